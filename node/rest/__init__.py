"""When a node does not train, because its owner wants the machine for himself."""
