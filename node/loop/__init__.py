"""The training loop: trainer supervision, rounds, stages, leases, pauses and the traffic budget."""
