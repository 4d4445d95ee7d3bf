"""How a node finds its run, and gets the manifest and the weights that it starts from."""
