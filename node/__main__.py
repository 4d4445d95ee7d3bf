"""``python -m farandole.node``: the node's commands."""

from .cli import main

main()
