"""Simulations of many nodes in virtual time, with the real state machines."""
