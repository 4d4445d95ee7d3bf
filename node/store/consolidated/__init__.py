"""Whole models as folders: put together from the stages' checkpoints, verified, exported, imported, gone on from."""
