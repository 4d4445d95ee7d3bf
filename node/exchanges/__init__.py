"""Contributions between two partners: the conversation, and the ways on which the bytes go."""
