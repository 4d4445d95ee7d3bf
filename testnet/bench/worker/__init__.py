"""What runs in a benchmark's own processes: one program, and a table of the parts that it can play."""
