"""A volunteer's settings of a node: its folder, the peers to dial, the inputs of training, its output.

Settings that all nodes of a run must agree on are in the manifest (`farandole.protocol.run.manifest`), never here.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from farandole.protocol.wire.errors import FarandoleError

from .config.setting import setting
from .quiet_hours import split_quiet_hours

HOME_VARIABLE = "FARANDOLE_HOME"
# Any free port on every IPv4 interface, and the same one at later starts (`farandole.node.join.address_book`).
# All addresses of this machine, on any port.
DEFAULT_LISTEN = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
# A tighter cap cannot promise a newcomer the slowest download that it waits for: 50 kbit/s, half of what is left for
# bulk whatever else goes on (`farandole.node.transfers.giver`), the other half being for an exchange.
MIN_CAP_MBIT: Final = 0.5

# Of a Hugging Face folder.
TOKENIZER_NAME: Final = "tokenizer.json"
# Lease of a router's port mapping: a router that is switched off forgets it anyway, and one whose node is gone should
# not keep it for long.
PORT_LEASE_SECONDS: Final = 3_600

LogLevel = Literal["debug", "info", "warning", "error"]
# Half of an invite's addresses, the most that it holds of the node that makes it.
MAX_ANNOUNCED: Final = 4
ANNOUNCED_FORM: Final = (
    f"at most {MAX_ANNOUNCED} public addresses, each as /ip4/PUBLIC-IP/tcp/PORT, /ip6/PUBLIC-IP/tcp/PORT or "
    "/dns/NAME/tcp/PORT, without /p2p, and at most 192 characters long"
)
NAME_FORM: Final = 'a text of at most 32 characters, without ", line ends, and invisible characters'
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Resolvers take a name that ends in a number for an IPv4 address (WHATWG URL); no top-level domain begins with a digit.
_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?![0-9]){_LABEL}")
_ADDRESS: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})")


def check_announced(addresses: Sequence[str]) -> list[str]:
    """Return the addresses that a node's owner announces, each once: it sees those of its own interfaces only.

    Behind a router with a forwarded port, 1:1 NAT (most cloud machines) or Docker's bridge network these are private.
    Peers report the public ones, but a run's first node has no peer yet when it makes its first invite.
    Raises `FarandoleError` unless all have `ANNOUNCED_FORM`.
    """
    distinct = list(dict.fromkeys(addresses))
    if len(distinct) > MAX_ANNOUNCED or not all(map(_is_public, distinct)):
        raise FarandoleError(f"expected {ANNOUNCED_FORM}")
    return distinct


def check_name(name: str | None) -> str | None:
    """Return a node's name; raise `FarandoleError` unless it has none, or every other node shows it."""
    if name is not None:
        from farandole.protocol.state.entries import shown_name  # imports cryptography, as below

        if shown_name(name) != name:
            raise FarandoleError(f"expected {NAME_FORM}")
    return name


def _is_public(address: str) -> bool:
    # They import cryptography, which ``--help`` does not need.
    from farandole.protocol.mesh.reachability import is_global
    from farandole.protocol.state.entries import MAX_MEMBER_ADDRESS_CHARS

    match = _ADDRESS.fullmatch(address)
    if match is None or len(address) > MAX_MEMBER_ADDRESS_CHARS or not 0 < int(match[3]) <= 65_535:
        return False
    kind, host = match[1], match[2]
    if kind.startswith("dns"):
        return _NAME.fullmatch(host) is not None
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.version == int(kind[-1]) and is_global(host)


def default_home() -> Path:
    """Return ``$FARANDOLE_HOME``, or ``~/.farandole``."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".farandole")


class InHome:
    """A path in the folder of the settings that it belongs to."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, settings: NodeSettings, owner: type[NodeSettings]) -> Path:
        return settings.home / self._name


@dataclass(frozen=True)
class NodeSettings:
    """One daemon's settings (`farandole.node.base.config.setting`)."""

    home: Path = field(default_factory=default_home)
    """The node's folder, which contains all its files."""
    invite: str | None = setting(
        None,
        "An invite, or for a run's first node a manifest file.",
        placeholder="INVITE",
        unset="the run that this folder knows",
        example="farandole1...",
        is_argument=True,
        panel="Run",
    )
    sources: Mapping[str, str] = field(default_factory=dict)
    """Setting -> ``flag``, ``environment``, ``file`` (or a kept limit) or ``default``; empty if no command made it."""
    manifest: Path | None = None
    """A manifest file, for the first node of a run. With an invite too: they must be of one run."""
    name: str | None = setting(
        None,
        "Name of this node for people, after its peer id's end: every member sees it, and the run's public page.",
        form=NAME_FORM,
        read=check_name,
        unset="none",
        example="Anna's PC",
        panel="Run",
    )
    port: int = setting(
        0,
        "TCP port to listen on, in place of port 0 in --listen. 0: a free one, and later the same one if free.",
        placeholder="PORT",
        least=0,
        most=65_535,
        panel="Network",
    )
    listen: list[str] = setting(
        DEFAULT_LISTEN,
        "Address to listen on, as /ip4/192.168.1.10/tcp/4001; repeatable. By default all addresses of this machine.",
        placeholder="MULTIADDR",
        panel="Network",
    )
    announce: list[str] = setting(
        [],
        "Public address to announce to peers and put into invites, for a port that you forward, a cloud machine or "
        "Docker; repeatable, at most 4.",
        placeholder="ADDRESS",
        form=ANNOUNCED_FORM,
        read=check_announced,
        example=["/dns/node.example.org/tcp/4001"],
        panel="Network",
    )
    bootstrap: list[str] = setting(
        [],
        "Address of a peer to dial, in addition to the invite's, with its peer id at the end; repeatable.",
        placeholder="MULTIADDR",
        example=["/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."],
        panel="Network",
    )
    trainer: Literal["own", "external"] = setting(
        "own",
        "own: farandole's built-in trainer; external: the node waits for your training loop (farandole.NoLoCo).",
        panel="Run",
    )
    device: str = setting(
        "auto", "Device to train on: auto, cpu, cuda, cuda:1, mps.", placeholder="DEVICE", panel="Run"
    )
    data: list[Path] = setting(
        [],
        "File or folder of text, JSON lines, Parquet or ready tokens (.bin), for runs that need text; repeatable.",
        placeholder="PATH",
        example=["texts"],
        panel="Run",
    )
    tokenizer: Path | None = setting(
        None,
        "The run's Hugging Face tokenizer file.",
        placeholder="FILE",
        unset="none, for runs that need none",
        example="tokenizer.json",
        panel="Run",
    )
    data_field: str = setting(
        "text",
        "Name of the field (JSON lines) or column (Parquet, data sets) that contains the text.",
        placeholder="NAME",
        panel="Run",
    )
    stream: list[str] = setting(
        [],
        "Hugging Face data set to train on while it downloads, instead of --data: OWNER/NAME, OWNER/NAME:CONFIG, "
        "or a folder; repeatable. Needs the Python packages of farandole's extra `data`.",
        placeholder="DATASET",
        example=["HuggingFaceFW/fineweb-edu:sample-10BT"],
        panel="Run",
    )
    base: Path | None = setting(
        None,
        "Your copy of the base model, a Hugging Face folder, for runs that train adapters of it.",
        placeholder="FOLDER",
        unset="none, for runs that need none",
        example="Qwen3-8B",
        panel="Run",
    )
    allow_model: list[str] = setting(
        [],
        "Function of an installed package that may build the run's model, for runs with a model of their own; "
        "repeatable. It runs with your rights.",
        placeholder="PACKAGE.MODULE:FUNCTION",
        example=["mypackage.models:build"],
        panel="Run",
    )
    max_rounds: int | None = setting(
        None,
        "Stop training after this round of the run, and stay online.",
        unit="rounds",
        least=1,
        unset="trains as long as it runs",
        example=1000,
        panel="Run",
    )
    disk: float = setting(
        0.0,
        "Largest size of this node's folder; 0: no limit. A low limit costs first the copy of another node's "
        "checkpoint, then the second newest of its own.",
        unit="GB",
        least=0.2,
        or_zero=True,
        panel="Limits",
    )
    slow: float = setting(
        1.0,
        "Pace of inner steps: 1 trains all the time, 2 half of the time.",
        placeholder="FACTOR",
        least=1,
        panel="When to train",
    )
    step_seconds: float = setting(
        0.0,
        "Least duration of an inner step, for a pace that does not depend on the machine's load; 0: none. Only for "
        "models that are not cut into stages.",
        unit="seconds",
        least=0,
        is_hidden=True,
    )
    quiet_hours: list[str] = setting(
        [],
        "Hours without training, in local time: 22:00-07:30, or Sat-Sun 09:00-18:00; repeatable.",
        placeholder="HOURS",
        form="hours as 22:00-07:30 or 'Sat-Sun 09:00-18:00'; in the settings file, a list of them in quotes",
        read=split_quiet_hours,
        example=["Mon-Fri 18:00-23:00"],
        panel="When to train",
    )
    only_when_idle: bool = setting(
        False,
        "Train only while no other program uses the NVIDIA GPU, and not on battery.",
        panel="When to train",
    )
    ignore_notices: bool = setting(
        False,
        "Continue to train when the run's creator pauses or stops the run; its messages are still shown.",
        panel="When to train",
    )
    compile: bool = setting(
        False,
        "Compile inner steps with torch.compile: takes a minute at the start, and pays off on a GPU. Needs a C++ "
        "compiler. Only for models that are not cut into stages.",
    )
    lean: bool = setting(
        False,
        "Train in half of the GPU's memory, in bf16 with stochastic rounding: at the peak 8 bytes a parameter instead "
        "of 18, with Muon 6 instead of 14. Exchanges stay fp32. On a CPU it saves nothing. Refused in deterministic or "
        "audited runs, with stages, and for other models than farandole's own.",
    )
    recompute: bool = setting(
        False,
        "Compute each layer again in the backward pass: less memory for activations, the same gradients, inner steps "
        "about a third longer. Only for farandole's own models.",
    )
    stage: int | None = setting(
        None,
        "Hold this stage of a model that is cut into stages, and do not move; stage 0 draws the data.",
        placeholder="STAGE",
        least=0,
        unset="the one that the run needs most",
        example=0,
        panel="Run",
    )
    start: Path | None = setting(
        None,
        "Folder of a model, written by `checkpoint pull` or `import`, for the first node of a run that starts from it; "
        "the other nodes fetch it.",
        placeholder="FOLDER",
        unset="fetched from others, for runs that have one",
        example="model",
        panel="Run",
    )
    checkpoint_seconds: float = setting(60.0, "Interval between checkpoints.", unit="seconds", least=0.1)
    backup_seconds: float = setting(
        5.0,
        "Interval between checks for a newer checkpoint of another node, which this node then copies for newcomers.",
        unit="seconds",
        least=0.1,
        is_hidden=True,
    )
    # Much longer than a trainer waits for a slow disk or on a busy machine.
    hung_seconds: float = setting(
        300.0,
        "Restart the trainer after this long without a sign of life, and no sooner than after 20 of its inner steps.",
        unit="seconds",
        least=1.0,
        is_hidden=True,
    )
    # The base period T of the run state's heartbeats; the testnet, with few nodes, takes 2.
    heartbeat_seconds: float = setting(10.0, "Interval between heartbeats.", unit="seconds", least=0.1, is_hidden=True)
    # One is the fastest where several nodes share a machine.
    threads: int = setting(1, "Number of cores that training uses.", unit="threads", least=1, panel="Limits")
    gpu_memory: float = setting(
        0.0,
        "Most GPU memory that the trainer uses; 0: what it needs. With little it takes fewer sequences at a time.",
        unit="GB",
        least=1.0,
        or_zero=True,
        panel="Limits",
    )
    validate_every: int = setting(10, "Rounds between measurements on held-out text; 0: never.", unit="rounds", least=0)
    upload_mbit: float = setting(
        0.0,
        "Send no faster than this in total; 0: no cap.",
        unit="Mbit/s",
        least=MIN_CAP_MBIT,
        or_zero=True,
        panel="Limits",
    )
    download_mbit: float = setting(
        0.0,
        "Receive no faster than this in total; 0: no cap.",
        unit="Mbit/s",
        least=MIN_CAP_MBIT,
        or_zero=True,
        panel="Limits",
    )
    monthly_traffic: float = setting(
        0.0,
        "Traffic budget of a calendar month, both ways together; 0: none. It is released evenly; without budget "
        "left, the node skips exchanges.",
        unit="GB",
        least=1.0,
        or_zero=True,
        panel="Limits",
    )
    # Within `farandole.protocol.mesh.relay.Limits`.
    relay: bool = setting(
        True,
        "Relay traffic between peers that are behind NAT, if this node is publicly reachable.",
        panel="Network",
    )
    mdns: bool = setting(
        True,
        "Find other nodes of the run in the local network, by multicast, and be found there.",
        panel="Network",
    )
    upnp: bool = setting(True, "Ask the router to forward this node's port, by UPnP.", panel="Network")
    dashboard: bool = setting(
        True,
        "Serve the dashboard to this machine's browser: `farandole dashboard`.",
        panel="Page and log",
    )
    dashboard_port: int = setting(
        8710,
        "Dashboard port on 127.0.0.1; falls back to a free port.",
        placeholder="PORT",
        least=0,
        most=65_535,
        panel="Page and log",
    )
    log_level: LogLevel = setting("info", "Least severe level that goes into the log file.", panel="Page and log")

    @property
    def listening(self) -> list[str]:
        """The multiaddrs to listen on."""
        return [re.sub("/tcp/0$", f"/tcp/{self.port}", address) for address in self.listen]

    def with_base(self) -> NodeSettings:
        """Return these settings, where the base model's folder is given, with what follows from it."""
        if self.base is None:
            return self
        from farandole.protocol.run.own_model import ADAPTERS  # imports msgspec, which ``--help`` does not need

        tokenizer = self.base / TOKENIZER_NAME
        implied: dict[str, Any] = {"allow_model": [*self.allow_model, f"{ADAPTERS}={self.base.absolute()}"]}
        if self.tokenizer is None and tokenizer.exists():
            implied["tokenizer"] = tokenizer
        return replace(self, sources={**self.sources, **dict.fromkeys(implied, "--base")}, **implied)

    @property
    def port_lease(self) -> int | None:
        """The lease in seconds of the router's port mapping; None: the router is not asked."""
        return PORT_LEASE_SECONDS if self.upnp else None

    key = InHome("key")  # Ed25519, mode 0600
    lock = InHome("lock")  # held while a daemon uses the key
    store = InHome("store.sqlite")  # run state, manifest, known peers
    control = InHome("control.sock")  # the control API's socket
    door = InHome("trainer.sock")  # where a loop of the owner's attaches
    started_by_loop = InHome("started-by-loop")  # process ids of nodes that loops have started here
    programs = InHome("programs.sock")  # where the owner's programs use the mesh (`farandole.node.programs`)
    # Replicas: slow weights, momentum, optimizer, position in the data (`farandole.node.store.folder`).
    checkpoints = InHome("checkpoints")
    tokens = InHome("tokens")  # the text that this node brings, tokenised (`farandole.training.data.token_cache`)
    rounds = InHome("rounds.jsonl")  # the rounds that are over (`farandole.node.status.round_log`)
    log = InHome("log")  # the daemon's

    def fetched(self, stage: int | None) -> Path:
        """Return the path of a peer's checkpoint until the trainer has judged it: then it is adopted or deleted."""
        return self.home / ("fetched.safetensors" if stage is None else f"fetched-{stage}.safetensors")
