"""Checkpoints on disk: saving, serving, fetching, and consolidated models."""
