"""The attack zoo: hostile members of a testnet's run, and their cost to honest ones. It is not part of the wheel."""
