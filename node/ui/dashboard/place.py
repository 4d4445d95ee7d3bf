"""Where a node's page is: a file for the command line, which bears the token and is the owner's alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...base.system.files import open_binary


class PageAddress(msgspec.Struct, frozen=True):
    """Where a node's page is: the file beside its control socket."""

    url: str
    token: str

    @property
    def link(self) -> str:
        """What to open. The token is in the fragment, which a browser sends to nobody."""
        return f"{self.url}#{self.token}"


def find_place(place_file: Path) -> PageAddress | None:
    """Where the page of the node that runs here is, None if it has none."""
    try:
        return msgspec.json.decode(place_file.read_bytes(), type=PageAddress)
    except (OSError, msgspec.MsgspecError):
        return None


@contextmanager
def stored_place(place_file: Path, place: PageAddress) -> Iterator[PageAddress]:
    """Tell where it is, meanwhile; the owner alone, from the first moment."""
    place_file.unlink(missing_ok=True)
    with os.fdopen(open_binary(place_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(msgspec.json.encode(place))
    try:
        yield place
    finally:
        place_file.unlink(missing_ok=True)
