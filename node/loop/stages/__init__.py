"""Microbatches between the stages of a model that is cut, and who holds which stage."""
