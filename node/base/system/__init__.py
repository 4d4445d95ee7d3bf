"""What differs between operating systems, and what a node does where something is missing."""
