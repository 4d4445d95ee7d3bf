"""A node's files: its checkpoints, consolidated models, run files."""
