"""A scenario in one TOML file: a run, its nodes, the faults and their times, and the conditions to pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from farandole.node.base.config.toml_file import TomlFile, check, did_you_mean, read_toml
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import ManifestError

from ..natlab.kinds import KINDS, kind_named
from .fault import HOME_FAULTS, MAX_NODES, Chaos, Fault, FaultKind, draw_faults

MAX_FAULTS: Final = 1_000
# Partners are drawn at random: the next one may be the last one again, and sometimes no node is free.
ROUNDS_A_PARTNER: Final = 3

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]

_StepSeconds = Annotated[float, msgspec.Meta(ge=0, le=600)]
_Settings = dict[str, Any]


class ScenarioError(ManifestError):
    """The scenario is not valid; the message says which field and why."""


class HomeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The home of one node in the NAT lab (`farandole.testnet.natlab`), which needs Linux, root and nftables."""

    kind: str
    """One of `KINDS`; ``open`` is a public host."""
    up_mbit: _Positive | None = None
    """Upload rate in Mbit/s; None: unlimited."""
    down_mbit: _Positive | None = None
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    """Delay in each direction between the home and the internet."""
    loss: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Probability that a packet is lost, in each direction."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 1
    """Number of nodes in the home, which share its line and its local network."""

    def __post_init__(self) -> None:
        kind_named(self.kind)


class HostileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hostile processes among the nodes (`farandole.testnet.zoo`, which the wheel does not contain)."""

    members: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 2
    """Number of hostile processes, in addition to the honest nodes."""
    program: Literal["daemon", "ghosts", "flood"] = "daemon"
    """A daemon with a hostile part, or a program that takes part in the run state alone."""
    attack: str = "echo"
    """What a daemon sends as its contribution: a name of `farandole.testnet.zoo.member_attacks.ATTACKS`."""
    trains: bool = True
    """Whether it takes inner steps; a member that does not is always ready for an exchange."""
    pairing: Literal["honest", "greedy", "absent"] = "honest"
    """How it pairs: greedy ones propose to all at once and agree with all, absent ones never exchange after that."""


# What more nodes on the same cores need more of.
_TIME_LIMITS: Final = ("timeout", "wedged_after", "settle_timeout")
# Homes of a scenario that is played in homes without naming them: two nodes are open, the others have one of each kind.
DEFAULT_HOMES: Final = ("open", *KINDS)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario that `farandole testnet run` plays."""

    run: dict[str, Any]
    """The run's settings, as in a run file."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 8
    rounds: Annotated[int, msgspec.Meta(ge=1, le=256)] = 20
    """At most the number of losses that a status keeps."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of the run; replaces ``run.seed``."""
    slow: Annotated[tuple[Annotated[float, msgspec.Meta(ge=1, le=1_000)], ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Slow-down factor of each node's inner steps, from node 0 on; the others are not slowed."""
    step_seconds: _StepSeconds | Annotated[tuple[_StepSeconds, ...], msgspec.Meta(max_length=MAX_NODES)] = 0.0
    """Minimum seconds of an inner step, of all nodes or of each from node 0 on: nodes become as independent as machines
    of their own."""
    stage: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=511)], ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """The stage that each node holds for good, from node 0 on; the others choose, and move where they are needed."""
    start_together: bool = False
    """Whether no node trains before all are up: otherwise the first nodes are some rounds ahead."""
    stages: Annotated[int, msgspec.Meta(ge=0, le=512)] = 0
    """Number of the model's stages; replaces ``run.model.num_stages``; 0: keep that."""
    data: tuple[str, ...] = ()
    """Files and folders of text that every node trains on, as ``--data`` of ``join``; none: what ``run`` says."""
    device: str = "cpu"
    checkpoint_seconds: _Positive = 5.0
    timeout: _Positive = 280.0
    """Seconds from the first launch to the end of training."""
    wedged_after: _Positive = 60.0
    """A live node whose training makes no progress for this number of seconds is wedged."""
    settle_timeout: _Positive = 30.0
    """Seconds after the training in which the run state must become equal on all nodes."""
    min_partners: Annotated[int, msgspec.Meta(ge=0)] = 3
    """Minimum number of partners of each node, or as many as nodes and rounds allow; less is required of a node that
    joins when fewer rounds are left."""
    max_loss_merged: _Positive | None = None
    """Validation loss of the mean of all replicas, in nats per token."""
    every_round: bool = False
    """Whether each node must take part in each round from its first on, slower ones with fewer inner steps."""
    home: Annotated[tuple[HomeSettings, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Homes of the nodes, from node 0 on, and built again if there are more nodes; none: all nodes are on the
    loopback interface."""
    min_utilisation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of its time that each trainer must spend in inner steps."""
    exchanges_after_faults: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """Number of exchanges of each live node after the last fault until training ends, once it also has
    ``min_partners``, none of them hostile, however long its start took; then the nodes pause. 0: training ends when
    each node has done ``rounds``."""
    fault: Annotated[tuple[Fault, ...], msgspec.Meta(max_length=MAX_FAULTS)] = ()
    chaos: Chaos | None = None
    """Faults drawn at random from ``seed``, in addition to ``fault``; `parse_scenario` draws them."""
    min_throughput: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Tokens per given second, as a share of the clean run's (`farandole.testnet.play.judge`)."""
    min_throughput_of_others: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """The same of the nodes without faults."""
    max_spread_over_clean: _Positive | None = None
    """The replicas' spread over the clean run's."""
    max_heal_seconds: _Positive | None = None
    """Longest time from the end of a partition until all nodes have one run state."""
    max_exchange_over_ideal: _Positive | None = None
    """Each node's median exchange time, over the ideal time of its home's line; also, no exchange may fail."""
    no_false_death: bool = False
    """Whether no node may take a live node for dead."""
    max_growth: _Positive | None = None
    """Growth of a node's memory, as a share per hour (0.01: 1 %); its descriptors and tasks must be flat then, too."""
    max_loss_above_clean: _Positive | None = None
    """Share by which the loss may exceed the clean run's. Two clean runs of one manifest with the same keys were 1.2 %
    apart; smaller differences show only in many plays, or in a simulation."""
    min_exchanges_of_clean: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Exchanges of the nodes with one another, as a share of the clean run's."""

    hostile: HostileSettings | None = None
    """Hostile members; the same scenario without them is played first (`farandole.testnet.zoo.play`)."""

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise ScenarioError(*problems)

    def _problems(self) -> Iterator[str]:
        """Yield problems of settings with others; each problem begins with the name of a setting."""
        for index, fault in enumerate(self.fault):
            name = f"fault[{index}]: {fault.kind!r}"
            if max(fault.nodes, default=0) >= self.nodes:
                yield f"{name} names node {max(fault.nodes)}, but the last is {self.nodes - 1}"
            if fault.kind in HOME_FAULTS and not self.home:
                yield f"{name} befalls a home: say which there are, or --nat"
            if fault.at_round is not None and fault.at_round >= self.rounds:
                yield f"{name} in round {fault.at_round} of {self.rounds} never happens"
            if fault.kind == "join" and not fault.at_round:
                yield f"{name}: say at_round, from 1 on, so that there are weights to get"
            if fault.kind == "join" and 0 in fault.nodes:
                yield f"{name}: node 0 begins the run and cannot join late"
        if self.chaos is not None and max(self.chaos.nodes, default=0) >= self.nodes:
            yield f"chaos.nodes names node {max(self.chaos.nodes)}, but the last is {self.nodes - 1}"
        for name in ("slow", "stage", "step_seconds"):
            entries = getattr(self, name)
            if isinstance(entries, tuple) and len(entries) > self.nodes:
                yield f"{name} has {len(entries)} entries for {self.nodes} nodes"
        if self.max_exchange_over_ideal is not None and not self.home:
            yield "max_exchange_over_ideal: say home, whose line it is"

    @property
    def partners_required(self) -> int:
        """Return how many partners each node can be expected to meet among those of its stage, up to the minimum."""
        others = self.nodes // max(1, self.stages) - 1
        return min(self.min_partners, others, self.rounds // ROUNDS_A_PARTNER)

    @property
    def clean(self) -> Scenario:
        """Return the scenario without its faults and hostile members."""
        return msgspec.structs.replace(self, fault=(), chaos=None, hostile=None)

    def named_by(self, kind: FaultKind) -> frozenset[int]:
        """Return the nodes that faults of a kind name."""
        return frozenset(index for fault in self.fault if fault.kind == kind for index in fault.nodes)

    def slowness(self, index: int) -> float:
        """Return how many times slower node ``index`` computes."""
        return self.slow[index] if index < len(self.slow) else 1.0

    def seconds_of_step(self, index: int) -> float:
        """Return the minimum seconds of an inner step of node ``index``."""
        if not isinstance(self.step_seconds, tuple):
            return self.step_seconds
        return self.step_seconds[index] if index < len(self.step_seconds) else 0.0

    def manifest(self, now: float) -> Manifest:
        """Return the run's manifest; raises `ManifestError` if its settings are not valid."""
        settings = {**self.run, "seed": self.seed}
        model, data = self.run.get("model"), self.run.get("data", {})
        if self.stages and isinstance(model, str | Mapping):
            settings["model"] = {**({"preset": model} if isinstance(model, str) else model), "num_stages": self.stages}
        if self.data and isinstance(data, Mapping):
            settings["data"] = {**data, "source": "text"}
        return manifest_of(settings, Path(), now)


# The source has scenarios with hostile members; the wheel does not.
_FOLDERS: Final = ("scenarios", "zoo/scenarios")


def _delivered() -> dict[str, Traversable]:
    """Return the scenarios that come with farandole, by name."""
    folders = [files("farandole.testnet").joinpath(name) for name in _FOLDERS]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return {entry.name.removesuffix(".toml"): entry for entry in entries if entry.name.endswith(".toml")}


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with farandole."""
    return sorted(_delivered())


def load_scenario(
    name_or_path: str,
    *,
    nodes: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    stages: int | None = None,
    data: Sequence[Path] = (),
    nat: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Scenario:
    """Load a delivered scenario by its name, or a file; the other arguments replace its values.

    With ``nat`` the nodes are in homes, in the default ones if the scenario names none. With ``data`` they train on
    that text, whose loss may be any. ``say`` is called with each condition that is dropped because there are too few
    nodes or rounds.

    Raises `ScenarioError`, `ManifestError` for its run settings, or `DataError` for text that is missing or too little.
    """
    file = _read(name_or_path)
    sizes = {"nodes": nodes, "rounds": rounds, "stages": stages}
    with file.named():
        settings = _resized(file.values, {name: size for name, size in sizes.items() if size is not None}, say)
        if seed is not None:
            settings["seed"] = seed
        if nat and not settings.get("home"):
            settings["home"] = [{"kind": kind} for kind in DEFAULT_HOMES]
        if data:
            settings |= {"data": [str(path.absolute()) for path in data], "max_loss_merged": None}
        scenario = parse_scenario(settings)
        if not scenario.data and scenario.manifest(0.0).data.source == "text":
            raise ScenarioError('run.data.source is "text": say which, with data = ["FOLDER"] or --data FOLDER')
    required, asked = scenario.partners_required, scenario.min_partners
    if required < asked and any(sizes.values()):
        say(f"min_partners is {required}, not the scenario's {asked}: there are too few nodes or rounds for more")
    if scenario.data:
        from farandole.training.data.dataset import Bring, build_sampler  # imports numpy

        text = Bring(tuple(map(Path, scenario.data)))
        build_sampler(scenario.manifest(0.0), bytes(32), bytes(32), text).held_out_batch(0)
    return scenario


def _read(name_or_path: str) -> TomlFile:
    if (delivered := _delivered().get(name_or_path)) is not None:
        return read_toml(Path(str(delivered)))
    if Path(name_or_path).exists():
        return read_toml(Path(name_or_path))
    near = did_you_mean(name_or_path, scenario_names())
    hint = f"; did you mean {near}?" if near else ""
    raise ScenarioError(
        f"no scenario {name_or_path!r}: name a TOML file, or one of {', '.join(scenario_names())}{hint}"
    )


def _resized(settings: _Settings, sizes: Mapping[str, int], say: Callable[[str], None]) -> _Settings:
    """Return the settings with other sizes, without conditions that these sizes cannot reach."""
    made = {**settings, **sizes}
    if not sizes:
        return made
    usual = parse_scenario(settings)
    has_fewer_rounds = sizes.get("rounds", usual.rounds) < usual.rounds
    if has_fewer_rounds and usual.max_loss_merged is not None:
        made["max_loss_merged"] = None
        say(f"max_loss_merged does not count: it is meant for the scenario's {usual.rounds} rounds")
    if (more := sizes.get("nodes", 0) / usual.nodes) > 1:
        made |= {name: more * getattr(usual, name) for name in _TIME_LIMITS}
        seconds = more * usual.manifest(0.0).rounds.exchange_seconds
        made["run"] = {**usual.run, "rounds": {**usual.run.get("rounds", {}), "exchange_seconds": seconds}}
        say(f"time limits are {more:.3g} times the scenario's: so many nodes share this machine's cores")
    return made


def parse_scenario(settings: _Settings) -> Scenario:
    """Parse a TOML file's table; `ManifestError` names a fault of the scenario or of its run."""
    check(settings, Scenario)
    scenario = msgspec.convert(settings, Scenario)
    try:
        scenario.manifest(0.0)
    except ManifestError as error:
        raise ManifestError(*(f"run.{problem}" for problem in error.args)) from error
    if scenario.chaos is None:
        return scenario
    try:
        drawn = draw_faults(scenario.chaos, scenario.nodes, scenario.seed)
        return msgspec.convert(settings | {"fault": [*scenario.fault, *drawn]}, Scenario)
    except (msgspec.ValidationError, ValueError) as error:
        raise ScenarioError(f"chaos: {error}") from error
