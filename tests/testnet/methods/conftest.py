"""The fixtures of tests of training, for those that compare it."""

from ...training.conftest import inner, make_replica, model, text

__all__ = ["inner", "make_replica", "model", "text"]
