"""The methods that `testnet compare` trains: baselines, and outer rules that no run file knows."""
