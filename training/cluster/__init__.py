"""A user's own loop, in one process or as ranks of torchrun."""
