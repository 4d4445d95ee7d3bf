"""Control methods of a node for its owner: members (invite, revoke, notice), bandwidth caps, and quiet hours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import trio

from farandole.protocol.wire.errors import ManifestError
from farandole.protocol.wire.identity import peer_id_of
from farandole.protocol.wire.messagepack import encode

from .base.bandwidth import Shaping
from .base.config.file import SETTINGS, keep_limits
from .base.control import ControlError, Handler
from .base.figures import BYTES_PER_MBIT
from .base.quiet_hours import QuietHoursError
from .base.settings import MIN_CAP_MBIT, NodeSettings
from .loop.rest_service import RestService
from .member.run_member import RunMember
from .status.journal import Journal

# A node with its manifest is in its run within seconds, unless all whom it dials are silent: it is looked for so long.
LOOKS_FOR_RUN: Final = 60
LOOK_INTERVAL: Final = 0.1


def taken(params: Mapping[str, Any], **kinds: type) -> list[Any]:
    """Return the parameters of a request in the order of ``kinds``. Raises `ControlError` if they are others."""
    if params.keys() != kinds.keys() or not all(isinstance(params[name], kind) for name, kind in kinds.items()):
        raise ControlError("bad_request", f"expected {', '.join(kinds)}")
    return [params[name] for name in kinds]


def roster_of(member: RunMember) -> list[dict[str, Any]]:
    """Return the members as ``farandole run members`` shows them."""
    state, credentials = member.gossip.state, member.credentials
    live = member.membership.everyone | {member.mesh.host.author}
    rows = []
    for author, told in sorted(state.members().items()):
        sponsor = None if credentials is None else credentials.roster.sponsor_of(author)
        row: dict[str, Any] = {"peer_id": peer_id_of(author), "name": told.name}
        row |= {"is_live": author in live, "is_creator": author == state.creator}
        rows.append(row | {"invited_by": None if sponsor is None else peer_id_of(sponsor)})
    return rows


def admission_handlers(find_member: Callable[[], RunMember | None]) -> dict[str, Handler]:
    """Return the control handlers by the names of their methods; ``find_member``: None until the node knows its run."""

    async def in_run() -> RunMember:
        for _ in range(LOOKS_FOR_RUN):
            if (member := find_member()) is not None:
                return member
            await trio.sleep(LOOK_INTERVAL)
        raise ControlError("no_run", "this node is not in its run yet; `farandole status` says what it waits for")

    async def invite(params: dict[str, Any]) -> object:
        """Return the secret of an invite in hex; empty if the run is open to all."""
        member = await in_run()  # before, it does not know whether the run is for invited members
        if member.credentials is None:
            return ""
        uses, expires_at, quota = taken(params, uses=int, expires_at=float, quota=int)
        return encode(await member.credentials.invite(uses, expires_at, quota)).hex()

    async def network_key(params: dict[str, Any]) -> object:
        """Return the network key of a private run in hex; empty where strangers may connect."""
        return (await in_run()).mesh.host.upgrader.network_key.hex()

    async def admit(params: dict[str, Any]) -> object:
        """Revoke keys, or admit them again; return the members revoked, and the invite that each came by."""
        member = await in_run()
        if member.credentials is None:
            raise ControlError("open_run", "this run is for anybody, so no member can be removed")
        names, is_admitted, keeps_invites = taken(params, keys=list, is_admitted=bool, keeps_invites=bool)
        try:
            keys = [bytes.fromhex(str(name)) for name in names]
        except ValueError as error:
            raise ControlError("bad_request", str(error)) from error
        if is_admitted:
            await member.credentials.restore(keys)
            return []
        rows = []
        told = await member.credentials.revoke(keys, keeps_invites=keeps_invites)
        for key, admission, num_others in told:
            invitation, inviter = admission.invitation, admission.place(member.gossip.state.creator)[0]
            row = {"peer_id": peer_id_of(key), "invited_by": peer_id_of(inviter), "others": num_others}
            rows.append(row | {"uses": invitation.num_seats, "expires_at": invitation.expires_at})
        return rows

    async def roster(params: dict[str, Any]) -> object:
        """Return the members, and who invited them."""
        member = find_member()
        return [] if member is None else roster_of(member)

    async def notice(params: dict[str, Any]) -> object:
        """Publish a notice of the creator."""
        member = await in_run()
        action, text = taken(params, action=str, text=str)
        await member.notices.publish(action, text)
        return "done"

    return {"invite": invite, "network_key": network_key, "admit": admit, "roster": roster, "notice": notice}


def warn_of_overrides(settings: NodeSettings, journal: Journal, limits: Iterable[str]) -> str:
    """Return, and warn of, the flags and variables of this start that go before these kept limits."""
    ways = {each.name: {"flag": each.flag, "environment": each.variable} for each in SETTINGS}
    found = ", ".join(filter(None, (ways[name].get(settings.sources.get(name, "")) for name in limits)))
    if found:
        journal.warn(f"{found} goes before what `farandole limit` keeps: leave it out at the next start", "limits")
    return found


async def kept(settings: NodeSettings, journal: Journal, words: str, limits: Mapping[str, object]) -> str:
    """Keep limits that hold already for later starts; say and return ``words``, and whether that has succeeded."""
    try:
        await trio.to_thread.run_sync(keep_limits, settings.home, limits)
        found = warn_of_overrides(settings, journal, limits)
        words += f"; kept for later starts{f' without {found}, which goes before it' if found else ''}"
    except (OSError, ManifestError) as error:
        words += f"; until this node ends, since this cannot be kept: {error}"
    journal.say(words)
    return words


def set_caps(shaping: Shaping, params: Mapping[str, object]) -> str:
    """Set the caps in Mbit/s (0: none) that ``params`` name; return all caps in words.

    Raises `ControlError` for anything that is no cap.
    """
    caps = {}
    for name, shaper in (("upload_mbit", shaping.up), ("download_mbit", shaping.down)):
        cap = params.get(name, shaper.rate / BYTES_PER_MBIT)
        if isinstance(cap, bool) or not isinstance(cap, int | float):
            raise ControlError("bad_request", "a cap is a number")
        if not (cap == 0 or MIN_CAP_MBIT <= cap < math.inf):
            raise ControlError("bad_request", f"a cap is {MIN_CAP_MBIT:g} Mbit/s or more, or 0 for none")
        caps[shaper] = float(cap)
    for shaper, cap in caps.items():
        shaper.set_rate(cap * BYTES_PER_MBIT)
    up, down = (f"at most {cap:g} Mbit/s" if cap else "without a cap" for cap in caps.values())
    return f"upload {up}, download {down}"


def change_quiet_hours(keeper: RestService, params: Mapping[str, object]) -> str:
    """Rest in the quiet hours that ``hours`` in ``params`` lists, with commas between them; an empty text ends them.

    Returns them in words. Raises `ControlError` for anything else that is no quiet hours.
    """
    (text,) = taken(params, hours=str)
    hours = [part.strip() for part in text.split(",") if part.strip()]
    try:
        keeper.change_hours(hours)
    except QuietHoursError as error:
        raise ControlError("bad_request", str(error)) from error
    return f"quiet hours {', '.join(hours)}" if hours else "no quiet hours"
