"""What a node and its trainer say to each other, and when a trainer is replaced."""
