"""The run to join, the peers to dial and the ports to listen on, as the invite and the folder name them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from farandole.protocol.run.invite import PREFIX, VERSION, InviteError, decode_invite, is_invite, split_address
from farandole.protocol.run.manifest import Manifest, SignedManifest, decode_manifest
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.identity import short_name

from ...daemon import NETWORK_KEY_FACT
from ...join.address_book import AddressBook
from ...join.kept_ports import load_ports
from ...state.store import MANIFEST_FACT, StoreError, open_store
from .causes import Finding, found


@dataclass
class RunToJoin:
    """The run to join, as far as it is known, and peers that may know it."""

    findings: list[Finding] = field(default_factory=list)
    run_id: bytes | None = None
    doors: list[tuple[bytes, str]] = field(default_factory=list)
    """Public key and multiaddr of each address that a person has named."""
    remembered: dict[bytes, list[str]] = field(default_factory=dict)
    """Peers from the folder's address book -> multiaddrs."""
    network_key: bytes = b""
    """Of a private run."""
    manifest: Manifest | None = None
    """Of that run, where the folder has it."""
    has_admission: bool = False
    """Whether the invite admits to a run of invited members."""
    kept_ports: dict[str, int] = field(default_factory=dict)
    """Multiaddr with port 0 -> the port on which the folder's node listened there before."""

    @property
    def is_for_invited(self) -> bool:
        """Return whether only invited members are told of the run, so that a visit is not."""
        return self.has_admission or (self.manifest is not None and self.manifest.admission != "open")


async def read_invitation(text: str | None, bootstrap: list[str], store: Path, listen: Sequence[str]) -> RunToJoin:
    """Read the invite and the folder; ``listen``: the node's multiaddrs. Raises nothing: a fault is a finding."""
    invitation = RunToJoin()
    if text is not None and not is_invite(text) and await trio.to_thread.run_sync(os.path.isfile, text):
        await _read_manifest(trio.Path(text), invitation)
    elif text is not None:
        _read_invite(text, invitation)
    for address in bootstrap:
        try:
            invitation.doors.append((split_address(address)[1], address))
        except InviteError as error:
            invitation.findings.append(found("invite-address", why=error))
    known = await _read_store(trio.Path(store), listen, invitation)
    stored = None if known is None else known[1].run_id
    if text is None:
        invitation.run_id = stored
        invitation.findings.append(found("invite-none") if stored is None else found("invite-stored"))
    elif stored is not None and invitation.run_id not in (None, stored):
        invitation.findings.append(found("invite-other-run", home=store.parent, run=stored.hex()[:16]))
    if known is not None and invitation.run_id == stored:
        invitation.manifest = known[0]
    return invitation


def _read_invite(text: str, invitation: RunToJoin) -> None:
    clean = "".join(text.split()).lower()
    try:
        invite = decode_invite(text)
    except InviteError as error:
        is_other_version = is_invite(text) and not clean.startswith(PREFIX + VERSION)
        cause = "invite-other-version" if is_other_version else "invite-damaged" if is_invite(text) else "invite-no"
        invitation.findings.append(found(cause, why=error))
        return
    invitation.run_id, invitation.network_key = invite.run_id, invite.network_key
    invitation.has_admission = bool(invite.admission)
    invitation.doors = [(split_address(address)[1], address) for address in invite.addresses]
    names = ", ".join(dict.fromkeys(short_name(peer) for peer, _ in invitation.doors))
    cause = "invite-fine" if invite.addresses else "invite-empty"
    invitation.findings.append(found(cause, run=invite.run_id.hex()[:16], names=names))


async def _read_manifest(path: trio.Path, invitation: RunToJoin) -> None:
    """Read the manifest file of a run's first node."""
    try:
        invitation.manifest, signed = decode_manifest(await path.read_bytes())
    except (OSError, FarandoleError) as error:
        invitation.findings.append(found("invite-manifest-damaged", path=path, why=error))
        return
    invitation.run_id = signed.run_id
    invitation.findings.append(found("invite-manifest", run=signed.run_id.hex()[:16]))


async def _read_store(
    path: trio.Path, listen: Sequence[str], invitation: RunToJoin
) -> tuple[Manifest, SignedManifest] | None:
    if not await path.exists():
        return None
    try:
        async with open_store(Path(path)) as store:
            book = AddressBook(store)
            await book.load()
            invitation.remembered = book.peers()
            invitation.kept_ports = await load_ports(store, listen)
            manifest = await store.get_fact(MANIFEST_FACT)
            invitation.network_key = invitation.network_key or await store.get_fact(NETWORK_KEY_FACT) or b""
    except StoreError:  # a full disk, which another check reports
        return None
    try:
        return decode_manifest(manifest) if manifest is not None else None
    except FarandoleError as error:
        invitation.findings.append(found("invite-store-damaged", store=path, why=error))
        return None
