"""When trainers start, rounds end and partners meet; which rounds are replayed."""
