"""The address of a node's page: a private file for the command line, which includes the access token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...base.system.files import open_private


class PageAddress(msgspec.Struct, frozen=True):
    """URL and token of a node's page, stored in a file next to its control socket."""

    url: str
    token: str

    @property
    def link(self) -> str:
        """The link to open. The token is in the fragment, which a browser sends to no server."""
        return f"{self.url}#{self.token}"


def find_place(place_file: Path) -> PageAddress | None:
    """Return the page address of the node that runs here, or None if it has none."""
    try:
        return msgspec.json.decode(place_file.read_bytes(), type=PageAddress)
    except (OSError, msgspec.MsgspecError):
        return None


@contextmanager
def stored_place(place_file: Path, place: PageAddress) -> Iterator[PageAddress]:
    """Store the page's address within the block, in a file that is private to its owner from the start."""
    place_file.unlink(missing_ok=True)
    with os.fdopen(open_private(place_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(msgspec.json.encode(place))
    try:
        yield place
    finally:
        place_file.unlink(missing_ok=True)
