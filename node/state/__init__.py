"""I/O of the run state: gossip, the SQLite store, this node's own entries, frames between members."""
