"""Checkpoints as blocks: their hashes, copies and transfer."""
