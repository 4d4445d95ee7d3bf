"""Rounds' ends: contributions and their codecs, outer rules (`rule`), and the outer step."""
