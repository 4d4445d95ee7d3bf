"""Training from a loop of the user's own: attaches to a node, starts one, makes runs for such loops."""
