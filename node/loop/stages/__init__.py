"""Microbatches between the stages of a model that is cut, and which node holds which stage."""
