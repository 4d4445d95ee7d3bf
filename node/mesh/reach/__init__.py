"""How a node is reached behind its home, and helps others to be."""
