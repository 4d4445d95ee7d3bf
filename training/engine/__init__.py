"""The training code behind a node, from inner steps to checkpoints."""
