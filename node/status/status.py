"""A node's status: the value behind ``farandole status``, its ``--json``, and the testnet's report.

The daemon makes it on request and sends it over the control socket as JSON. Times are seconds: ``*_at`` Unix
time, ``*_seconds`` durations. Fields are added, never renamed: scripts read them. The changelog names one that goes.
"""

from __future__ import annotations

import msgspec

from farandole.protocol.state.node_state import NodeState
from farandole.protocol.wire.identity import with_name

# Text of an exchange's verdict after ``failed: ``, if a contribution was refused.
REFUSED_HERE = "refused:"
REFUSED_THERE = "the partner aborted: refused:"
# The same, if the partner had agreed and did not come.
NOT_BEGUN, NO_STREAM = "the partner did not begin in time", "the partner opened no stream in time"
# `NodeState.phase_detail` while a node waits for the run's starting checkpoint and no member has it.
NO_START = "no node that is there has the weights that this run starts from"


class ExchangeStatus(msgspec.Struct, frozen=True):
    """The last outer step that needed a partner, or would have."""

    round: int
    partner: str
    """Peer id; empty when the step was taken alone."""
    verdict: str
    """``committed``, ``alone: <reason>`` or ``failed: <reason>``."""
    bytes_sent: int
    bytes_received: int
    seconds: float
    ended_at: float
    path: str = ""
    """How the contributions moved: ``bulk`` (a channel of their own) or ``stream`` (libp2p's); empty when alone."""
    clip: float = 1.0
    """How far towards the partner's contribution the mean went: below 1, the screening has clipped it."""
    late_seconds: float = 0.0
    """Seconds that judging takes this machine, where the exchange had less."""


class MemberStatus(msgspec.Struct, frozen=True):
    """One member of the run, as this node sees it through the run state."""

    peer_id: str
    is_live: bool
    is_self: bool
    has_left: bool
    round: int
    inner_steps: int
    tokens: int
    tokens_per_second: float
    loss: float | None
    device: str
    addresses: list[str]
    is_connected: bool
    path: str
    """How we reach it: ``direct``, ``punched`` (direct, through a hole), ``relayed`` or empty when not connected."""
    last_seen_seconds: float | None
    """Seconds since its heartbeat last advanced on our clock; None: never seen alive."""
    stage: int = 0
    """Of the model, where it is cut into several."""
    is_paused: bool = False
    """It has no trainer now, because its owner has paused it."""
    last_partner: str = ""
    """Peer id of the member with which it averaged in its last round; empty: with none, or not known."""
    is_heard: bool = False
    """It sends heartbeats, but this node has not reached it (yet), so it does not count as live."""
    version: str = ""
    """Release of farandole, as it says; empty: not known."""
    is_apart: bool = False
    """It is connected, but runs a release that this node cannot average with."""
    name: str = ""
    """As it calls itself; it proves nothing. Empty: it has none."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened, in words."""

    at: float
    text: str
    is_warning: bool = False


class RunStatus(msgspec.Struct, frozen=True):
    """The run as a whole."""

    run_id: str
    name: str
    members_live: int
    members_gone: int
    """Members that have disappeared without leaving."""
    tokens: int
    tokens_per_second: float
    loss_mean: float | None
    loss_min: float | None
    loss_max: float | None
    state_root: str
    """Hex of the run state's root: equal on two nodes exactly when their entries are (heartbeats excluded)."""
    providers: list[int] = []
    """Live members of each stage, this node included."""
    members_heard: int = 0
    """Members whose heartbeats arrive, but that this node has not reached."""
    members_left: int = 0
    versions: dict[str, int] = {}
    """Release of farandole -> live members that say they run it, this node included; an empty release is not known."""


class PipelineStatus(msgspec.Struct, frozen=True):
    """Microbatch statistics of a node that holds a stage; counts are since it began."""

    stage: int
    in_flight: int
    """Microbatches of which the trainer holds data."""
    begun: int
    kept: int
    """Microbatches whose gradient counts, at all stages."""
    dropped: int
    rerouted: int
    """Microbatches sent to another node of the next stage than at first."""
    taken_out: int
    """Microbatches dropped when their gradient was already in the sum."""
    refused: int
    """Microbatches that arrived and were not accepted."""
    reasons: dict[str, int]
    """Reasons why microbatches were dropped."""
    bytes_sent: int
    """Bytes of activations and their gradients."""
    bytes_received: int


class Resources(msgspec.Struct, frozen=True):
    """A node's use of its machine's resources."""

    memory: int
    """Resident bytes of the daemon."""
    trainer_memory: int | None
    """Resident bytes of the trainer, if there is one; shared memory that both have mapped counts in both."""
    descriptors: int
    """Open descriptors of the daemon."""
    tasks: int
    """Tasks of the daemon's trio loop."""
    device_memory: int | None = None
    """Bytes of GPU memory that the trainer uses; None where it computes on the CPU."""
    device_memory_total: int | None = None
    """Bytes of memory that the GPU has."""


class TrafficStatus(msgspec.Struct, frozen=True):
    """A month's budget, where there is one."""

    limit: int
    """Bytes, both ways together."""
    used: int
    """Bytes used since the calendar month began."""
    is_saved: bool
    """Whether bulk waits until more of the budget is released."""
    resumes_at: float
    """Unix time until which bulk waits at most, if it waits."""


class DataStatus(msgspec.Struct, frozen=True):
    """Progress of the run's present epoch, as a node that draws data knows it."""

    epoch: int
    """From 1 on."""
    epochs: int
    slices: int
    """Slices of an epoch."""
    done: int
    """Slices that all nodes have trained on."""
    leased: int
    """Slices that this node has leased and not trained on yet."""
    others_texts: int
    """Live nodes with another text, with which no slices are shared."""
    doubted: int = 0
    """Slices that others report as done, but that this node doubts: they are trained on last."""


class AuditStatus(msgspec.Struct, frozen=True):
    """Rounds that this node has replayed, where the run has audits."""

    own: int
    """Replays of own rounds that gave this node's earlier results."""
    others: int
    """Replays of others' rounds that gave the results that their authors committed to."""
    avoided: dict[str, str]
    """Peer id -> reason why this node avoids it."""


class NodeStatus(NodeState, frozen=True, kw_only=True):
    """Everything that ``farandole status`` shows: the node's own state, and what its other parts know."""

    version: str
    peer_id: str
    pid: int
    started_at: float
    addresses: list[str]
    is_member: bool
    losses: list[tuple[int, float]]
    """(round, mean training loss), the newest 256 rounds."""
    loss_first: float | None
    validation: list[tuple[int, float]]
    """(round, loss on the held-out split), where it was measured."""
    exchanges_ok: int
    exchanges_alone: int
    exchanges_failed: int
    partners: dict[str, int]
    """Peer id -> committed exchanges with it."""
    bytes_sent: int
    bytes_received: int
    last_exchange: ExchangeStatus | None
    connected_peers: int
    run: RunStatus
    members: list[MemberStatus]
    warnings: list[str]
    """What a person should know and is still so, newest last."""
    warned_at: list[float] = msgspec.field(default_factory=list)
    """Unix time of each of `warnings`."""
    remarks: dict[str, str] = msgspec.field(default_factory=dict)
    """Peer id -> what this node holds against that peer (`farandole.node.status.journal.DEEDS`), and who invited it;
    the ones that were named last. They need not be members."""
    round_trips: dict[str, float] = msgspec.field(default_factory=dict)
    """Peer id of a connected member -> seconds, as last measured on the connection."""
    names: dict[str, str] = msgspec.field(default_factory=dict)
    """Peer id -> name of each of `members` that has one."""
    disk: str = ""
    """What could not be stored, and how much room to make; empty where nothing failed."""
    paths: dict[str, int] = msgspec.field(default_factory=dict)
    """``bulk`` or ``stream`` -> committed exchanges whose contributions moved so; see `ExchangeStatus.path`."""
    quiet_hours: list[str] = msgspec.field(default_factory=list)
    """The owner's, as in the settings."""
    upload_mbit: float = 0.0
    """The node's cap; 0: none."""
    download_mbit: float = 0.0
    bytes_sent_per_second: float = 0.0
    """Of everything, control traffic too; mean of the last 10 s."""
    bytes_received_per_second: float = 0.0
    pipeline: PipelineStatus | None = None
    """Where the model is cut into stages."""
    reachability: str = "unknown"
    """How others reach this node: ``public``, ``punchable``, ``relay only``, or ``unknown`` until peers have said."""
    relays: list[str] = msgspec.field(default_factory=list)
    """Peer ids of the relays through which others reach this node."""
    relayed_peers: int = 0
    """Peers that others reach through this node."""
    relayed_circuits: int = 0
    """Pairs of peers that talk through this node now."""
    data: DataStatus | None = None
    """Where the run counts epochs, and this node draws data."""
    recent_exchanges: list[ExchangeStatus] = msgspec.field(default_factory=list)
    """The last few, newest last; `last_exchange` is one of them."""
    traffic: TrafficStatus | None = None
    """None without a budget."""
    resources: Resources | None = None
    """None where the system does not say."""
    at: float = 0.0
    """Unix time of this status."""
    events: list[Event] = msgspec.field(default_factory=list)
    """Recent events, newest last."""
    audits: AuditStatus | None = None
    """Where the run has audits."""
    notice: str = ""
    """The notice of the run's creator to all members; empty: none."""
    mapped_addresses: list[str] = msgspec.field(default_factory=list)
    """Addresses at which the router says this node can be dialled; in ``addresses`` once others have dialled them."""
    doubted_addresses: list[str] = msgspec.field(default_factory=list)
    """Addresses that the owner announces, and at which no peer reaches this node now, as far as peers could try."""
    bits_per_byte: float | None = None
    """The newest of `validation` in bits per byte; None where the number of the text's bytes is not known."""

    def called(self, peer_id: str) -> str:
        """Return the end of a peer's id, with the name that it gives itself."""
        return with_name(peer_id, self.names.get(peer_id, ""))
