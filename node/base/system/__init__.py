"""Differences between operating systems, and replacements for missing features."""
