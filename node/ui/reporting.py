"""Reporter of the status: projects a node's state, the run state and the connections onto one value."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import psutil
import trio

from farandole.protocol.mesh.reachability import has_moved, is_closed
from farandole.protocol.state.entries import PARTNER_BYTES, Beat, Member, Progress
from farandole.protocol.state.liveness import Liveness
from farandole.protocol.state.node_state import LOSS_SCALE, NodeState
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import peer_id_of, public_key_of

from ..base.bandwidth import Shaping
from ..base.figures import BYTES_PER_MBIT
from ..base.project import VERSION
from ..base.system.processes import resident_bytes
from ..loop.audit_service import AuditService
from ..loop.lease_service import LeaseService
from ..loop.pipeline_service import PipelineService
from ..loop.rest_service import NoticeBoard, Rest
from ..loop.traffic_service import TrafficService
from ..mesh.host import Host
from ..mesh.reach.connectivity import Connectivity
from ..status.journal import Journal
from ..status.status import MemberStatus, NodeStatus, Resources, RunStatus

# One screen, and one answer of the control socket; a run of thousands is summed up in `RunStatus`.
MAX_MEMBERS_SHOWN = 1_000
# A member says its release itself: liars may say many.
MAX_VERSIONS = 8
# A look at a thousand members takes 10 ms, so above this number the result is reused for this many seconds.
MANY_MEMBERS, MEMBERS_AGE = 64, 5.0
# What this node knows of itself as a member, by the names of its state.
_OWN = ("stage", "round", "inner_steps", "tokens", "tokens_per_second", "loss")


@dataclass
class Reporter:
    """Reads the node's parts; owns nothing. ``state`` and ``liveness`` are None until the run is known."""

    host: Host
    journal: Journal
    run_id: bytes
    run_name: str
    started_at: float
    shaping: Shaping
    connectivity: Connectivity
    state: RunState | None = None
    liveness: Liveness | None = None
    pipeline: PipelineService | None = None
    leases: LeaseService | None = None
    audits: AuditService | None = None
    notices: NoticeBoard | None = None
    nodes_of_stages: Callable[[], Sequence[frozenset[bytes]]] = tuple
    apart: Callable[[], Collection[bytes]] = frozenset
    """Returns the peers whose release this node cannot average with."""
    traffic: TrafficService | None = None
    rest: Rest = field(default_factory=Rest)
    _seen: tuple[float, list[MemberStatus], RunStatus] | None = None
    """Time by trio's clock, the members, and their summary at that time."""
    _left: int = 0
    """How many others have left, if nobody else is known."""

    def status(self, max_members: int = MAX_MEMBERS_SHOWN) -> NodeStatus:
        """Return the present status with at most ``max_members`` members, connected ones first."""
        journal, host, shaping, connectivity = self.journal, self.host, self.shaping, self.connectivity
        members, run = self._look()
        shown, verdict = members, connectivity.reachability.verdict
        if len(members) > max_members:
            shown = sorted(members, key=lambda member: not (member.is_self or member.is_connected))[:max_members]
        return NodeStatus(
            **msgspec.structs.asdict(journal.state),
            version=VERSION,
            pid=os.getpid(),
            started_at=self.started_at,
            at=journal.clock(),
            **journal.history.facts(max_members),
            warnings=[event.text for event in journal.standing],
            warned_at=[event.at for event in journal.standing],
            disk=journal.disk,
            events=list(journal.events),
            # Addresses, connections and bandwidth
            peer_id=host.peer_id,
            addresses=host.addresses,
            mapped_addresses=host.own.all_mapped,
            doubted_addresses=[
                address
                for address in host.own.announced
                if journal.state.isolation or is_closed(address, verdict) or has_moved(address, verdict)
            ],
            connected_peers=len(host.connected),
            round_trips={
                member.peer_id: seconds
                for member in shown
                if (seconds := host.connections.round_trip(public_key_of(member.peer_id))) is not None
            },
            remarks=journal.remarks,
            names={member.peer_id: member.name for member in shown if member.name},
            reachability=verdict.kind.value,
            relays=[peer_id_of(held.relay) for held in host.relays.reservations],
            relayed_peers=len(connectivity.server.table.reservations),
            relayed_circuits=connectivity.server.table.num_circuits,
            quiet_hours=list(self.rest.quiet_hours),
            upload_mbit=shaping.up.rate / BYTES_PER_MBIT,
            download_mbit=shaping.down.rate / BYTES_PER_MBIT,
            bytes_sent_per_second=shaping.up.per_second(),
            bytes_received_per_second=shaping.down.per_second(),
            # The run, and what this node does for it
            is_member=any(member.is_self and not member.has_left for member in members),
            run=run,
            members=shown,
            pipeline=None if self.pipeline is None else self.pipeline.status(),
            data=None if self.leases is None else self.leases.status(),
            audits=None if self.audits is None else self.audits.status(),
            notice="" if self.notices is None else self.notices.words,
            traffic=None if self.traffic is None else self.traffic.status(),
            resources=measure_resources(journal.state),
        )

    def _look(self) -> tuple[list[MemberStatus], RunStatus]:
        """Return the members, live ones first, and the run. A large run's may be a few seconds old."""
        now = trio.current_time()
        if self._seen is not None and len(self._seen[1]) > MANY_MEMBERS and now - self._seen[0] < MEMBERS_AGE:
            return self._seen[1:]
        state, liveness, own, members = self.state, self.liveness, self.journal.state, []
        if state is not None and liveness is not None:
            heard = {peer for peer in liveness.live(now) if not liveness.is_suspect(peer)}
            live, connected, apart = liveness.present(now), self.host.connected, self.apart()
            for author, member in members_of(state, liveness, live, now):
                if author == self.host.author:  # its own state is newer than its published one
                    changes = {name: getattr(own, name) for name in _OWN}
                    changes |= {"is_self": True, "is_live": not member.has_left, "is_paused": own.phase == "paused"}
                    changes |= {"last_partner": own.partner, "version": VERSION}
                else:
                    changes = {"is_heard": author in heard - live and not member.has_left}
                changes |= {"is_connected": author in connected, "is_apart": author in apart}
                changes["path"] = self.host.connections.path(author) if author in connected else ""
                members.append(msgspec.structs.replace(member, **changes))
            members.sort(key=lambda member: (not member.is_live, not member.is_self, member.peer_id))
            del members[MAX_MEMBERS_SHOWN:]
        providers = [len(nodes) for nodes in self.nodes_of_stages()]
        run = run_status(self.run_id, self.run_name, state, members, providers)
        if all(member.is_self for member in members):  # others' entries last an hour
            run = msgspec.structs.replace(run, members_left=self._left)
        self._left = 0 if run.members_live > 1 or run.members_heard or run.members_gone else run.members_left
        self._seen = now, members, run
        return members, run


def members_of(
    state: RunState, liveness: Liveness, live: Collection[bytes], now: float
) -> Iterator[tuple[bytes, MemberStatus]]:
    """Yield the members' keys, and what the run state says of them; not how this node reaches them."""
    partners = {author[:PARTNER_BYTES]: author for author in state.authors}
    for author in state.authors:
        member = state.payload(author, Member)
        if member is None:
            continue
        beat = state.payload(author, Beat) or Beat(0, 0, None, 0)
        progress = state.payload(author, Progress)
        partner = partners.get(beat.partner)
        yield (
            author,
            MemberStatus(
                peer_id=peer_id_of(author),
                is_live=author in live and not member.left,
                is_self=False,
                has_left=member.left,
                stage=member.stage,
                round=beat.round,
                inner_steps=beat.inner_steps,
                tokens=progress.tokens if progress else 0,
                tokens_per_second=float(beat.tokens_per_second),
                loss=None if beat.loss is None else beat.loss / LOSS_SCALE,
                device=member.device,
                addresses=list(member.addresses),
                is_connected=False,
                path="",
                last_seen_seconds=liveness.seconds_since(author, now),
                is_paused=member.is_paused,
                last_partner=peer_id_of(partner) if partner else "",
                version=member.version,
                name=member.name,
            ),
        )


def run_status(
    run_id: bytes, name: str, state: RunState | None, members: Sequence[MemberStatus], providers: Sequence[int] = ()
) -> RunStatus:
    """Return the run as a whole, by its members; ``providers``: live members of each stage."""
    live = [member for member in members if member.is_live]
    num_heard, num_left = (sum(getattr(member, name) for member in members) for name in ("is_heard", "has_left"))
    losses = [member.loss for member in live if member.loss is not None]
    gone_tokens = state.total_progress().tokens if state is not None else 0
    return RunStatus(
        run_id=run_id.hex(),
        name=name,
        members_live=len(live),
        members_heard=num_heard,
        members_left=num_left,
        members_gone=len(members) - len(live) - num_heard - num_left,
        tokens=max(gone_tokens, sum(member.tokens for member in members)),
        tokens_per_second=sum(member.tokens_per_second for member in live),
        loss_mean=sum(losses) / len(losses) if losses else None,
        loss_min=min(losses, default=None),
        loss_max=max(losses, default=None),
        state_root=state.root.hex() if state is not None else "",
        providers=list(providers),
        versions=dict(Counter(member.version for member in live).most_common(MAX_VERSIONS)),
    )


def measure_resources(state: NodeState) -> Resources | None:
    """Measure this process, in which trio runs, and its trainer; None where the system keeps that secret."""
    memory, pid = resident_bytes(os.getpid()), state.trainer_pid
    if memory is None:
        return None
    device_memory, total = (None, None) if pid is None or state.device_memory is None else state.device_memory
    return Resources(
        memory=memory,
        trainer_memory=None if pid is None else resident_bytes(pid),
        descriptors=psutil.Process().num_fds(),
        tasks=trio.lowlevel.current_statistics().tasks_living,
        device_memory=device_memory,
        device_memory_total=total,
    )
