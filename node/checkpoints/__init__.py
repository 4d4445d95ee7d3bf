"""A node's checkpoints: the folder in which they lie, and what is done with them."""
