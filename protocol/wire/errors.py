"""Whose fault it is: the type of an error says it (h11's habit)."""

from __future__ import annotations


class FarandoleError(Exception):
    """Base of every error that farandole raises on purpose."""


class LocalProtocolError(FarandoleError):
    """This node asked for something that the protocol does not allow: a defect here, not at the peer."""


class RemoteProtocolError(FarandoleError):
    """A peer sent bytes that no honest peer sends. Costs that peer its stream, and nobody else anything."""


class FloodError(RemoteProtocolError):
    """A peer sent more than any honest peer sends, be it valid or not. Costs that peer its connection, for a while."""


class ManifestError(FarandoleError, ValueError):
    """A manifest, an invite or a run file is not valid; the message says which field and why.

    It has an argument for each problem, if there are several.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UnknownManifestError(ManifestError):
    """A manifest is its creator's, and says what this version does not know: a newer or an older one does."""
