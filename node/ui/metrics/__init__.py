"""A node's figures over time: for Prometheus, and round by round in a file."""
