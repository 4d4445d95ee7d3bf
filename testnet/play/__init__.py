"""A testnet: scenarios, the nodes that play them, faults, and the report with a verdict."""
