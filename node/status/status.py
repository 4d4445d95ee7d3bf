"""What a node tells people of itself: the value behind ``farandole status``, its ``--json``, and the testnet's report.

One value, made by the daemon on request and sent over the control socket as JSON. Times are seconds: ``*_at`` Unix
time, ``*_seconds`` durations. Fields are added, never renamed: scripts read them.
"""

from __future__ import annotations

import msgspec

from farandole.protocol.node_state import NodeState

# How the verdict of an exchange goes on after ``failed: ``, where a contribution was refused.
REFUSED_HERE = "refused:"
REFUSED_THERE = "the partner aborted: refused:"
# Who wants to see all members looks at these.
MAX_LINKS = 32


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
    """Since its heartbeat last advanced on our clock; None: never seen alive."""
    stage: int = 0
    """Of the model, where it is cut into several."""
    is_paused: bool = False
    """It has no trainer now, because its owner wants it so."""
    last_partner: str = ""
    """Peer id of the member with whom it averaged in its last round; empty: with nobody, or not known."""
    is_heard: bool = False
    """It sends heartbeats, but this node has not reached it (yet), so it does not count as live."""


class LinkStatus(msgspec.Struct, frozen=True):
    """What lies between this node and another: one that it is connected to, or has lately exchanged with."""

    peer_id: str
    path: str
    """As in `MemberStatus`."""
    round_trip_seconds: float | None = None
    """As last measured on the connection; None: not yet, or there is none."""
    bytes_per_second: float | None = None
    """Both ways together, mean of the last exchange that was committed, its waits included: the line gives at least
    that. None: none was, of late."""
    committed: int = 0
    """Exchanges."""
    last_round: int | None = None
    """Of the last exchange; None: there was none, of late."""
    last_verdict: str = ""
    """As in `ExchangeStatus`."""
    last_at: float = 0.0


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
    """Members whose heartbeats come, but that this node has not reached."""


class PipelineStatus(msgspec.Struct, frozen=True):
    """What a node that holds a stage does with microbatches; counts are since it began."""

    stage: int
    in_flight: int
    """Microbatches that the trainer holds something of."""
    begun: int
    kept: int
    """Whose gradient counts, at all stages."""
    dropped: int
    rerouted: int
    """Sent to another node of the next stage than at first."""
    taken_out: int
    """Dropped when their gradient was in the sum already."""
    refused: int
    """That came and were not taken."""
    reasons: dict[str, int]
    """Why they were dropped."""
    bytes_sent: int
    """Of activations and their gradients."""
    bytes_received: int


class Resources(msgspec.Struct, frozen=True):
    """What a node takes of its machine."""

    memory: int
    """Resident bytes of the daemon."""
    trainer_memory: int | None
    """Of the trainer, if there is one; what both have mapped of shared memory counts in both."""
    descriptors: int
    """Open ones, of the daemon."""
    tasks: int
    """Of the daemon's trio."""
    device_memory: int | None = None
    """Of the GPU, taken by the trainer; None where it computes on the CPU."""
    device_memory_total: int | None = None
    """That the GPU has."""
    processor_seconds: float | None = None
    """Processor time of the daemon, since it began."""


class TrafficStatus(msgspec.Struct, frozen=True):
    """A month's budget, where there is one."""

    limit: int
    """Bytes, both ways together."""
    used: int
    """Of them, since the calendar month began."""
    is_saved: bool
    """Whether bulk waits for more to come in."""
    resumes_at: float
    """Unix time until which it does at most, if it does."""


class DataStatus(msgspec.Struct, frozen=True):
    """How far the run's present epoch is, as a node that draws data knows it."""

    epoch: int
    """From 1 on."""
    epochs: int
    slices: int
    """Of an epoch."""
    done: int
    """By all nodes."""
    leased: int
    """By this node, and not trained on yet."""
    others_texts: int
    """Live nodes whose text is another, with whom no slices are shared."""
    doubted: int = 0
    """Slices of which others say that they are done, and this node does not believe it: they are trained on last."""


class AuditStatus(msgspec.Struct, frozen=True):
    """Rounds that this node has replayed, where the run has audits."""

    own: int
    """That gave what this node had computed before."""
    others: int
    """That gave what their authors committed to."""
    avoided: dict[str, str]
    """Peer id -> why it is not met."""


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
    """What a person should know, newest last."""
    paths: dict[str, int] = msgspec.field(default_factory=dict)
    """``bulk`` or ``stream`` -> committed exchanges whose contributions moved so; see `ExchangeStatus.path`."""
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
    """When this was said."""
    links: list[LinkStatus] = msgspec.field(default_factory=list)
    """Connections, and then partners of before, at most `MAX_LINKS`; of each, who exchanged last comes first."""
    events: list[Event] = msgspec.field(default_factory=list)
    """What happened lately, newest last."""
    audits: AuditStatus | None = None
    """Where the run has audits."""
    notice: str = ""
    """What the run's creator has to say to all members; empty: nothing."""
    mapped_addresses: list[str] = msgspec.field(default_factory=list)
    """Where the router says that this node can be dialled; in ``addresses`` once others have done so."""
