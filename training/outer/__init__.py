"""Outer rules: what replicas send to each other, and how their slow weights move by it. One file for each rule.

`rule` says what a rule is. A rule of kind ``noloco`` is the file ``noloco.py`` here, whose ``RULE`` makes it of its
settings, the struct of that kind in `farandole.protocol.run.rules`.
"""
