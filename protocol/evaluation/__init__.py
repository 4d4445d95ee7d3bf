"""Evaluations of a run by its members."""
