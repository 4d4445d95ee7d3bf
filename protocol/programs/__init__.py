"""What a node and its owner's own programs say to each other."""
