"""Screening rules: whether a partner's contribution is averaged, and how far. One file for each rule.

`rule` says what a rule is. A rule of kind ``guard`` is the file ``guard.py`` here, whose ``RULE`` makes
it of its settings, the struct of that kind in `farandole.protocol.run.rules`.
"""
