"""A scenario: a run, how many nodes, what goes wrong when, and what must hold at the end. One TOML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from farandole.node.base.settings import MIN_CAP_MBIT
from farandole.node.store.run_file import manifest_of, read_toml
from farandole.protocol.errors import ManifestError
from farandole.protocol.manifest import Manifest

from .chaos import Chaos, ChaosError, draw_faults
from .fault import HOME_FAULTS, MAX_NODES, Fault, FaultKind
from .natlab.kinds import KINDS, KindError, kind_named

MAX_FAULTS: Final = 1_000
DEFAULT_NODES: Final = 8
DEFAULT_ROUNDS: Final = 20
DEFAULT_MIN_PARTNERS: Final = 3
# Partners are drawn at random: the next one may be the last one again, and now and then nobody is free.
ROUNDS_A_PARTNER: Final = 3

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Caps = Annotated[tuple[Annotated[float, msgspec.Meta(ge=0, le=1e6)], ...], msgspec.Meta(max_length=MAX_NODES)]


_Settings = dict[str, Any]


class ScenarioError(ManifestError):
    """The scenario is not valid; the message says which field and why."""


class LinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between each node and all others; needs Linux and root (`farandole.testnet.links`)."""

    up_mbit: _Positive
    """Mbit/s that a node can send."""
    down_mbit: _Positive
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    """From one node to another; a round trip takes twice as long."""


class HomeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one node is in the NAT lab (`farandole.testnet.natlab`), which needs Linux, root and nftables."""

    kind: str
    """One of `KINDS` or `CARRIER_KINDS`; ``open`` is a public host."""
    up_mbit: _Positive | None = None
    """None: as fast as the machine."""
    down_mbit: _Positive | None = None
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    """From the home to the internet, and back."""
    loss: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """A packet's chance to be lost, either way."""

    def __post_init__(self) -> None:
        try:
            kind_named(self.kind)
        except KindError as error:
            raise ValueError(str(error)) from error


class HostileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hostile processes among the nodes (`farandole.testnet.zoo`), of which none is in the wheel."""

    members: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 2
    """How many, on top of the honest nodes; of a ``program`` as many processes."""
    program: Literal["daemon", "ghosts", "flood"] = "daemon"
    """A daemon with a hostile part, or a program that speaks to the run state alone."""
    attack: str = "echo"
    """What a daemon sends for its contribution: a name of `farandole.testnet.zoo.member_attacks.ATTACKS`."""
    tokens: Annotated[int, msgspec.Meta(ge=0, le=10**12)] = 10**12
    """What it says it has learned from in a round."""
    trains: bool = True
    """Whether it takes inner steps; who does not is always ready to meet others."""
    pairing: Literal["honest", "greedy", "absent"] = "honest"
    """How it finds partners: greedy ones propose to all at once and agree with all, absent ones never exchange then."""
    max_loss_above_clean: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.03
    """Share by which the honest members' held-out loss may be above that of the honest alone. Two plays of the honest
    alone, of the same keys, were 1.2 % apart; less than that only many plays, or a simulation, can tell."""
    min_exchanges: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Share of the exchanges that the honest alone had among themselves, which they must have here."""
    max_fair_share: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    """How many times its fair share of the honest members' rounds a hostile one may have; 0: not asked."""


# For scenarios that are played in homes without saying in which: two nodes can be called, the others have one of each.
DEFAULT_HOMES: Final = ("open", *KINDS)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `farandole testnet run` plays."""

    run: dict[str, Any]
    """As in a run file."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = DEFAULT_NODES
    rounds: Annotated[int, msgspec.Meta(ge=1, le=256)] = DEFAULT_ROUNDS
    """At most as many as a status keeps losses of."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Of the run; replaces ``run.seed``."""
    slow: Annotated[tuple[Annotated[float, msgspec.Meta(ge=1, le=1_000)], ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """How many times slower each node computes, from node 0 on; the others are as fast as they can."""
    step_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """Each node takes at least so long for an inner step: as independent of each other as machines of their own."""
    stage: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=511)], ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """The stage that each node holds for good, from node 0 on; the others choose, and move where they are needed."""
    upload_mbit: _Caps = ()
    """The nodes' own caps, from node 0 on, in Mbit/s; 0, and the others: none."""
    download_mbit: _Caps = ()
    start_interval: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.3
    """Seconds between the starts of two nodes: many at once only fight for the cores."""
    start_together: bool = False
    """Whether no node trains before all are up: else those that start first are some rounds ahead."""
    stages: Annotated[int, msgspec.Meta(ge=0, le=512)] = 0
    """Into which the model is cut; replaces ``run.model.num_stages``, 0: as that says."""
    device: str = "cpu"
    """Where the trainers compute."""
    heartbeat_seconds: _Positive = 2.0
    checkpoint_seconds: _Positive = 5.0
    validate_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout: _Positive = 280.0
    """Seconds for the whole, from the first launch to the end of training."""
    wedged_after: _Positive = 60.0
    """A live node whose training stands still for so many seconds is wedged."""
    settle_timeout: _Positive = 30.0
    """Seconds after the training in which the run state must become equal everywhere."""
    min_partners: Annotated[int, msgspec.Meta(ge=0)] = DEFAULT_MIN_PARTNERS
    """With so many each node must have averaged; where the file leaves it out, fewer nodes or rounds lower it."""
    max_loss_merged: _Positive | None = None
    """Validation loss of the mean of all replicas, nats a token."""
    max_empty_seconds: _Positive = 30.0
    """For so long a stage may be held by nobody, once all have been held."""
    every_round: bool = False
    """Whether each node must take part in each round from its first on, slower ones with fewer inner steps."""
    link: LinkSettings | None = None
    """None: all nodes on the loopback interface."""
    home: Annotated[tuple[HomeSettings, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Of each node, from node 0 on, and round again if there are more nodes; none: no NAT lab."""
    min_utilisation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of its time that each trainer must spend in inner steps."""
    exchanges_after_faults: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """Once every fault is over, training goes on until each live node has averaged this often again, and with
    ``min_partners`` in all, however long its start took; then the nodes pause. 0: until each has done ``rounds``."""
    fault: Annotated[tuple[Fault, ...], msgspec.Meta(max_length=MAX_FAULTS)] = ()
    chaos: Chaos | None = None
    """Faults drawn at random from ``seed``, beside those of ``fault``; `parse_scenario` draws them."""
    min_throughput: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Share of the tokens a given second of the clean run that it is compared with (`farandole.testnet.beside`)."""
    min_throughput_of_others: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """The same of the nodes that no fault befalls."""
    max_spread_over_clean: _Positive | None = None
    """The replicas' spread over the clean run's."""
    max_heal_seconds: _Positive | None = None
    """From the end of each partition until all nodes have one run state."""
    max_exchange_over_ideal: _Positive | None = None
    """Each node's median exchange, over what its home's line allows; and none may fail."""
    no_false_death: bool = False
    """Whether no node may take another for dead that is there."""
    max_growth: _Positive | None = None
    """Of a node's memory, share an hour (0.01: 1 %); its descriptors and tasks must be flat then, too."""
    max_loss_above_clean: _Positive | None = None
    """Share by which the merged model's loss may be above the clean run's."""

    hostile: HostileSettings | None = None
    """Who attacks the nodes; the same scenario without is played first (`farandole.testnet.zoo.play`)."""

    def __post_init__(self) -> None:
        for fault in self.fault:
            if max(fault.nodes, default=0) >= self.nodes:
                raise ValueError(
                    f"fault {fault.kind!r} names node {max(fault.nodes)}, but the last is {self.nodes - 1}"
                )
            if fault.kind in HOME_FAULTS and not self.home:
                raise ValueError(f"fault {fault.kind!r} befalls a home: say which there are, or --nat")
            if fault.at_round is not None and fault.at_round >= self.rounds:
                raise ValueError(f"fault {fault.kind!r} in round {fault.at_round} of {self.rounds} never happens")
            if fault.kind == "join" and not fault.at_round:
                raise ValueError("fault 'join': say at_round, from 1 on, so that there are weights to get")
        if 0 in self.late_joiners:
            raise ValueError("node 0 begins the run and cannot join late")
        for name in ("slow", "stage", "upload_mbit", "download_mbit"):
            if len(entries := getattr(self, name)) > self.nodes:
                raise ValueError(f"{name} has {len(entries)} entries for {self.nodes} nodes")
        if any(0 < cap < MIN_CAP_MBIT for cap in (*self.upload_mbit, *self.download_mbit)):
            raise ValueError(f"upload_mbit, download_mbit: a cap is at least {MIN_CAP_MBIT:g} Mbit/s; 0 is none")
        if self.link and self.home:
            raise ValueError("say link, or home, which has a link of its own")
        if self.max_exchange_over_ideal is not None and not self.home:
            raise ValueError("max_exchange_over_ideal: say home, whose line it is")
        if self.chaos is not None and max(self.chaos.nodes, default=0) >= self.nodes:
            raise ValueError(f"chaos names node {max(self.chaos.nodes)}, but the last is {self.nodes - 1}")
        if self.min_partners >= self.nodes:
            raise ValueError(
                f"min_partners is {self.min_partners}: each of {self.nodes} nodes has {self.nodes - 1} others"
            )

    @property
    def late_joiners(self) -> frozenset[int]:
        """Nodes that a ``join`` fault starts."""
        return self._named_by("join")

    @property
    def clocked(self) -> frozenset[int]:
        """Nodes whose clock a fault sets."""
        return self._named_by("set_clock")

    def _named_by(self, kind: FaultKind) -> frozenset[int]:
        return frozenset(index for fault in self.fault if fault.kind == kind for index in fault.nodes)

    def slowness(self, index: int) -> float:
        """How many times slower node ``index`` computes."""
        return self.slow[index] if index < len(self.slow) else 1.0

    def caps(self, index: int) -> tuple[float, float]:
        """What node ``index`` sends and receives at most, in Mbit/s; 0: no cap."""
        up, down = (caps[index] if index < len(caps) else 0.0 for caps in (self.upload_mbit, self.download_mbit))
        return up, down

    def manifest(self, now: float) -> Manifest:
        """The run's manifest; `ManifestError` if its settings are not valid."""
        run = {**self.run, "seed": self.seed}
        if self.stages:
            model = run.get("model", {})
            run["model"] = {**({"preset": model} if isinstance(model, str) else model), "num_stages": self.stages}
        return manifest_of(run, Path(), now)


# Those with hostile members come with the source alone, as these do.
_FOLDERS: Final = ("scenarios", "zoo/scenarios")


def _delivered() -> dict[str, Traversable]:
    """The scenarios that come with farandole, by name."""
    folders = [files("farandole.testnet").joinpath(name) for name in _FOLDERS]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return {entry.name.removesuffix(".toml"): entry for entry in entries if entry.name.endswith(".toml")}


def scenario_names() -> list[str]:
    """Those that come with farandole."""
    return sorted(_delivered())


def load_scenario(
    name_or_path: str,
    *,
    nodes: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    stages: int | None = None,
    nat: bool = False,
    clean: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Scenario:
    """A delivered scenario by its name, or a file; the other arguments replace what it says.

    With ``nat`` the nodes are in homes, in the default ones if it names none. ``clean``: without its faults. ``say`` is
    told what of the scenario is not asked of so few nodes or rounds.

    Raises `ScenarioError`, or `ManifestError` for its run settings.
    """
    if (delivered := _delivered().get(name_or_path)) is not None:
        settings = read_toml(Path(str(delivered)))
    elif Path(name_or_path).exists():
        settings = read_toml(Path(name_or_path))
    else:
        raise ScenarioError(f"no scenario {name_or_path!r}: name a TOML file, or one of {', '.join(scenario_names())}")
    sizes = {"nodes": nodes, "rounds": rounds, "stages": stages}
    settings = _within_reach(settings, {name: size for name, size in sizes.items() if size is not None}, say)
    if seed is not None:
        settings["seed"] = seed
    if nat and not settings.get("home"):
        settings["home"] = [{"kind": kind} for kind in DEFAULT_HOMES]
    if clean:
        settings |= {"fault": [], "chaos": None, "hostile": None}
    return parse_scenario(settings)


def _within_reach(settings: _Settings, sizes: Mapping[str, int], say: Callable[[str], None]) -> _Settings:
    """The settings with other sizes; what they ask for and so few nodes or rounds cannot reach gives way."""
    made = {**settings, **sizes}
    asked, most, before = settings.get("min_partners"), _num_others(made), _number(settings, "rounds", DEFAULT_ROUNDS)
    rounds = sizes.get("rounds", before)
    if rounds < before:
        most = min(most, rounds // ROUNDS_A_PARTNER)
    if sizes and isinstance(asked, int) and asked > most:
        made["min_partners"] = most
        say(f"min_partners is {most}, not the scenario's {asked}: there are too few nodes or rounds for more")
    if rounds < before and settings.get("max_loss_merged") is not None:
        made["max_loss_merged"] = None
        say(f"max_loss_merged does not count: it is meant for the scenario's {before} rounds")
    return made


def _num_others(settings: _Settings) -> int:
    """With whom each node may average: the others of its stage, at least."""
    nodes, stages = _number(settings, "nodes", DEFAULT_NODES), _number(settings, "stages", 1)
    return max(0, nodes // max(1, stages) - 1)


def _number(settings: _Settings, name: str, default: int) -> int:
    """As it stands there; what is no number is refused later, by its name."""
    value = settings.get(name)
    return value if isinstance(value, int) else default


def parse_scenario(settings: _Settings) -> Scenario:
    """From a parsed TOML file; `ScenarioError` names the field, `ManifestError` that of the run."""
    reachable = min(_num_others(settings), _number(settings, "rounds", DEFAULT_ROUNDS) // ROUNDS_A_PARTNER)
    settings = {"min_partners": min(DEFAULT_MIN_PARTNERS, reachable), **settings}
    try:
        scenario = msgspec.convert(settings, Scenario)
        if scenario.chaos is not None:
            drawn = draw_faults(scenario.chaos, scenario.nodes, scenario.seed)
            scenario = msgspec.convert(settings | {"fault": [*scenario.fault, *drawn]}, Scenario)
    except (msgspec.ValidationError, ChaosError) as error:
        raise ScenarioError(f"scenario: {error}") from error
    scenario.manifest(0)
    return scenario
