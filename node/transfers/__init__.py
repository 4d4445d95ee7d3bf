"""Transfers of checkpoints: fetching and serving their blocks, copies for others, weights for the trainer."""
