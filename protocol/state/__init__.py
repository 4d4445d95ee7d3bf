"""What nodes know of each other: the run state, a CRDT of signed entries, and how it spreads."""
