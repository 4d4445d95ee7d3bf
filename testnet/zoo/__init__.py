"""The attack zoo: hostile members of a testnet's run, and what they cost the honest. It comes with the source alone."""
