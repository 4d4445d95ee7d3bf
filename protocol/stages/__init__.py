"""How microbatches travel through a model in stages."""
