"""The run state's I/O: gossip, the store on disk, this node's entries, frames between members."""
