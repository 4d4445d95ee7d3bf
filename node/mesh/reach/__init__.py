"""How a node behind a home router is reached, and helps others to be reached."""
