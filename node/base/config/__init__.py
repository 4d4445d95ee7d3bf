"""A node's settings as data: each is declared once, and flag, variable, key, ``config init`` and reference follow."""
