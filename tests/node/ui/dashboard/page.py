"""A dashboard with a status chosen by the test, served on loopback as a daemon serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.base.control import ControlError
from farandole.node.base.figures import BYTES_PER_MBIT
from farandole.node.control_methods import set_caps
from farandole.node.status.status import NodeStatus
from farandole.node.ui.dashboard.app import PageAddress, open_dashboard

from ...statuses import NOW, STATUS


def mbit_of(shaper: Shaper) -> float:
    return shaper.rate / BYTES_PER_MBIT


@dataclass
class Shown:
    """The status on the page, and the actions that were requested through it."""

    place: PageAddress
    status: NodeStatus = STATUS
    actions: list[str] = field(default_factory=list)

    @property
    def link(self) -> str:
        return f"{self.place.url}#{self.place.token}"

    @property
    def port(self) -> int:
        return int(self.place.url.rstrip("/").rpartition(":")[2])


@asynccontextmanager
async def open_page(clock: Callable[[], float] = lambda: NOW) -> AsyncIterator[Shown]:
    shown = Shown(PageAddress("", ""))

    async def pause(params: dict[str, Any]) -> object:
        shown.actions.append("pause")
        shown.status = msgspec.structs.replace(shown.status, phase_detail="resting")
        return "pausing"

    async def leave(params: dict[str, Any]) -> object:
        raise ControlError("not_now", "it is leaving already")

    async def invitation(params: dict[str, Any]) -> object:
        return "farandole1" + "x" * 300 + "\nno peer reaches this node"

    shaping = Shaping()

    async def limit(params: dict[str, Any]) -> object:
        words = set_caps(shaping, params)
        shown.status = msgspec.structs.replace(
            shown.status, upload_mbit=mbit_of(shaping.up), download_mbit=mbit_of(shaping.down)
        )
        return words

    async def quiet(params: dict[str, Any]) -> object:
        if "night" in params["hours"]:
            raise ControlError("bad_request", f"{params['hours']!r} is no quiet hours")
        shown.status = msgspec.structs.replace(shown.status, quiet_hours=[params["hours"]])
        return f"quiet hours {params['hours']}"

    actions = {"pause": pause, "leave": leave, "invitation": invitation, "limit": limit, "quiet": quiet}
    async with open_dashboard(0, lambda: shown.status, actions, clock) as shown.place:
        yield shown
