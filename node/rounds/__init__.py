"""One round after the other: the trainer, the pairing and the exchange brought together."""
