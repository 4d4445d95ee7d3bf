"""How nodes share the slices of the data, so that each is trained on once an epoch."""
