"""Status values: what a node reports about itself, and the log of its rounds."""
