"""Peers of other projects, each run in a virtual environment that has that project and not farandole."""
