"""A daemon's parts before it is a member of a run: on this machine, and among its peers."""

from __future__ import annotations

from dataclasses import dataclass

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.state.believing import Partners

from ..base.bandwidth import Shaping
from ..base.settings import NodeSettings
from ..join.address_book import AddressBook
from ..loop.rest_service import Rest
from ..loop.traffic_service import TrafficService
from ..mesh.host import Host
from ..mesh.reach.connectivity import Connectivity
from ..state.store import Store
from ..status.journal import Journal
from ..trainer.script import ScriptDoor


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon's parts on this machine, before it knows a peer."""

    settings: NodeSettings
    key: Ed25519PrivateKey
    store: Store
    book: AddressBook
    partners: Partners
    journal: Journal
    is_leaving: trio.Event
    """Set when it is asked to leave."""
    rest: Rest
    door: ScriptDoor | None = None
    """The door at which the owner's loop attaches, if a loop trains."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A daemon among its peers; made by `open_mesh`."""

    host: Host
    connectivity: Connectivity
    shaping: Shaping
    traffic: TrafficService
