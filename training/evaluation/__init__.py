"""A model as lm-evaluation-harness asks it."""
