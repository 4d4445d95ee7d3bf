"""Baselines that `testnet compare` trains."""
