"""A node's settings as data: each is declared once, and flag, variable, key, ``config init`` and reference follow.

What is wrong in a settings file, a run file or a scenario is explained by `toml_file`.
"""
