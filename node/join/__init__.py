"""How a node finds its run, and gets the manifest."""
