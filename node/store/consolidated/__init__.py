"""Whole models as folders: merged from the stages' checkpoints, verified, exported, imported, and resumed from."""
