"""How two partners move their contributions: a commit by both or by neither."""
