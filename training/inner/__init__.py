"""The inner optimizer and its schedule."""
