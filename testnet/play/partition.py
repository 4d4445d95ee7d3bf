"""A network that splits into two parts, in the NAT lab: its internet forwards nothing between them."""

from __future__ import annotations

from collections.abc import Sequence

from ..natlab.home import Home


def rules(table: str, addresses: Sequence[str]) -> str:
    """Return input for ``nft -f``: a table that drops packets between these addresses and all others."""
    part = f"{{ {', '.join(addresses)} }}"
    return f"""table ip {table} {{
  chain forward {{
    type filter hook forward priority filter
    ip saddr {part} ip daddr != {part} drop
    ip saddr != {part} ip daddr {part} drop
  }}
}}
"""


def part(homes: Sequence[Home]) -> None:
    """Cut these homes off from all others; they still reach each other."""
    homes[0].internet.run("nft -f -", rules(_table(homes), [home.address for home in homes]))


def heal(homes: Sequence[Home]) -> None:
    """Undo `part`."""
    homes[0].internet.run(f"nft delete table ip {_table(homes)}")


def _table(homes: Sequence[Home]) -> str:
    return f"part{homes[0].index}"
