"""What keeps a machine from joining a run: every cause, with its severity, its text for people, and a remedy.

`farandole doctor` reports all findings, and `farandole join` ends with those that failed. ``farandole doctor --json``
prints findings, whose fields are only added to. Names of causes stay, since scripts rely on them. Braces are filled
with a check's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Final

import msgspec

from farandole.protocol.run.releases import ReleaseConflict
from farandole.protocol.state.believing import ClockSkew

from .figures import duration

# A peer says its release itself, so a line names few.
MAX_NAMED: Final = 3
_HOW: Final = "docs/volunteer.md#upgrade"


def release_words(conflict: ReleaseConflict, own: str) -> tuple[str, str]:
    """Return what is wrong, and what to do about it; ``own``: this node's release."""
    peers = (*conflict.older, *conflict.newer)
    number = "1 connected peer runs" if len(peers) == 1 else f"{len(peers)} connected peers run"
    text = f"{number} {releases(peers, own)}; this node runs {own}, and the two cannot average"
    if conflict.newer and conflict.older:
        return text, f"use one release everywhere, the newest: {_HOW}"
    if conflict.newer:
        return text, f"this node's release is the older one: upgrade this node ({_HOW})"
    return text, f"theirs is the older one: ask their owners to upgrade ({_HOW}); this node has nothing to do"


def releases(versions: Sequence[str], own: str) -> str:
    """Return the distinct releases as text, at most `MAX_NAMED` of them."""
    distinct = sorted(set(versions))
    known = [f"another farandole {own}" if name == own else f"farandole {name}" for name in distinct if name]
    named = known if len(known) == len(distinct) else [*known, "a farandole that does not say its release"]
    more = ["others"] if len(named) > MAX_NAMED else []
    *first, last = [*named[:MAX_NAMED], *more]
    return f"{', '.join(first)} and {last}" if first else last


SET_CLOCK: Final = "set it, for example with `timedatectl set-ntp true`"
COMPARE_CLOCKS: Final = "check the time on both; `timedatectl set-ntp true` sets it"


def describe_skew(seconds: float) -> str:
    """Describe the difference of a clock that is ahead by ``seconds``, or behind if that is negative."""
    return f"{duration(abs(seconds))} {'ahead' if seconds > 0 else 'behind'}"


def clock_words(skew: ClockSkew) -> tuple[str, str]:
    """Return what is wrong with the clock, and the remedy."""
    difference = f"this machine's clock is {describe_skew(skew.seconds)}"
    if skew.is_agreed:
        return f"{difference}, as the clocks of {skew.num_members} members show", SET_CLOCK
    members = "the one member" if skew.num_members == 1 else f"all {skew.num_members} members"
    return f"{difference} compared with {members} that it reached: one of the clocks is wrong", COMPARE_CLOCKS


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A node works, but less well than it could, or the check could not decide."""
    FAILED = "failed"
    """A node cannot work before this is fixed."""
    SKIPPED = "skipped"
    """There was nothing to check, or no way to check it."""


class Finding(msgspec.Struct, frozen=True):
    """One result of one check."""

    check: str
    """Such as ``key``."""
    cause: str
    """Such as ``key-readable-by-others``: a name for scripts, one of `CAUSES`."""
    level: Level
    found: str
    """The result in a line for people."""
    remedy: str = ""
    """What to do about it, in a line; empty where there is nothing to do."""

    @property
    def words(self) -> str:
        """Return the finding and its remedy in one line."""
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


class Diagnosis(msgspec.Struct, frozen=True):
    """The findings of all checks, in the order in which a node needs the checked things."""

    findings: tuple[Finding, ...]
    is_well: bool
    """Nothing failed."""
    schema: int = 1


def _cause(level: Level, found: str, remedy: str = "") -> tuple[Level, str, str]:
    return level, found, remedy


_ok, _warning, _failed, _skipped = (partial(_cause, level) for level in Level)
_MAKE_ROOM: Final = "free some space, or name a folder on another disk with --home"
_OPEN_PORT: Final = (
    "nothing needs doing: it works through relays. To be faster, switch on the router's UPnP; or forward its TCP port "
    "4001 to this machine, and join with --port 4001 --announce /ip4/PUBLIC-IP/tcp/4001"
)
_NEWER_INVITE: Final = "ask for a newer invite (`farandole run invite`)"
DIAL_MOVED: Final = "if a member's public address changed: `farandole dial ADDRESS`"
_FIND_AGAIN: Final = f"{DIAL_MOVED}; or {_NEWER_INVITE}"
WIDER_INVITE: Final = (
    "in that network, check that its node runs; elsewhere, ask for an invite (`farandole run invite`) of a "
    "node with a public address or a relay"
)

CHECKS: Final = (
    *("home", "node", "key", "disk", "memory", "torch", "data", "port", "invite", "bootstrap"),
    *("run", "clock", "nat", "relay"),
)
"""The checks in the order of the report, in which a node needs the checked things."""

CAUSES: Final = {
    # The folder
    "home-fine": _ok("{home} can be written to"),
    "home-missing": _ok("{home} is not there yet, and can be made"),
    "home-unwritable": _failed(
        "{home} cannot be written to: {why}", "name a folder that you may write to with --home or FARANDOLE_HOME"
    ),
    "node-running": _ok("a node runs with this folder: it is {kind}"),
    "node-silent": _warning(
        "a node runs with this folder and does not answer",
        "wait a minute and try again; else end its process, or use another folder with --home",
    ),
    "node-none": _ok("no node runs with this folder"),
    "key-fine": _ok("{key} is intact, and only you can read it"),
    "key-missing": _ok("there is no key yet: the first `farandole join` makes one"),
    "key-unreadable": _failed("{key} cannot be read: {why}", "make it yours: sudo chown $USER {key}"),
    "key-broken": _failed(
        "{key} is damaged: a key has {wanted} bytes, and it has {size}",
        "restore it from a copy; without one remove it, and the node joins with a new identity",
    ),
    "key-readable-by-others": _failed("{key} can be read by others (mode {mode})", "chmod 600 {key}"),
    "disk-fine": _ok("{free} free"),
    "disk-small": _warning(
        "{free} free, and all checkpoints may take {good} more",
        _MAKE_ROOM + ". With --disk the node keeps fewer checkpoints",
    ),
    "disk-nearly-full": _failed("only {free} free where {home} is, and {least} more are needed at least", _MAKE_ROOM),
    "disk-full": _failed("the disk of {home} is full ({free} free)", _MAKE_ROOM),
    "memory-fine": _ok("this run's model needs {needed}, {free} is free"),
    "memory-in-use": _ok("this run's model needs {needed}, and the node that runs has it"),
    "memory-short": _warning(
        "this run's model needs {needed} of memory here, for one sequence at a time, and {free} is free: the system "
        "may kill the trainer",
        "close other programs",
    ),
    "memory-too-little": _failed(
        "this run's model needs {needed} of memory here, for one sequence at a time, and this machine (or the node's "
        "control group) has {total}",
        "take a machine with more{gpu}, a run of a smaller model, or ask the creator for one whose model is cut into "
        "stages",
    ),
    "memory-untold": _skipped("no run is known"),
    # The machine
    "torch-fine": _ok("PyTorch {version} computes on {device}"),
    "torch-slow": _warning("PyTorch has not started within {seconds:g} s", "try again: the second start is faster"),
    "torch-broken": _failed(
        "PyTorch cannot be used: {why}", "install it again: {python} -m pip install --force-reinstall torch"
    ),
    "device-missing": _failed(
        "PyTorch {version}: {why}", "use --device auto, which takes what is there, or --device cpu"
    ),
    "gpu-unused": _warning(
        "there is an NVIDIA GPU, but PyTorch {version} computes on {device}",
        "install farandole with PyTorch for CUDA (docs/install.md), or update NVIDIA's driver",
    ),
    "data-none": _ok("no text of your own is named: a run that asks for it needs --data or --stream"),
    "data-fine": _ok("{path} can be read"),
    "data-empty": _failed(
        "there is nothing to read in {path}", "name files of text, or a folder that has some, with --data"
    ),
    "data-unreadable": _failed(
        "{path} cannot be read: {why}", "check its name and permissions, or name other text with --data"
    ),
    "data-stream": _ok("{name} can be streamed, if the Hugging Face Hub has it"),
    "data-no-stream": _failed(
        "{name} is neither a folder nor a data set's name",
        "name a data set as the Hugging Face Hub does: --stream OWNER/NAME, or OWNER/NAME:CONFIG",
    ),
    "data-no-package": _failed(
        "to stream {name} needs the Python package {package}, which is not installed", "{command}"
    ),
    "data-two-kinds": _failed("both --data and --stream are given, and a node takes only one of them", "leave out one"),
    "port-fine": _ok("{address} is free"),
    "port-ours": _ok("{address} is taken, apparently by the node that runs here"),
    "port-taken": _failed(
        "{address} is taken by another program",
        "stop that program; or choose another port, as in --port 4002 (0: any that is free)",
    ),
    "port-kept-taken": _warning(
        "port {port}, on which this node listened before, is taken by another program: invites that name it do not "
        "lead to this node",
        "stop that program; or make new invites once the node runs, on another port",
    ),
    "port-unusable": _failed(
        "cannot listen on {address}: {why}",
        "name an address of this machine with --listen, and a port above 1023, as in --port 4001",
    ),
    "port-no-ipv6": _ok("{address} is left out: this system has no IPv6"),
    "port-no-address": _failed(
        "cannot listen on {address}: it is not a valid address",
        "write it as in --listen /ip4/192.168.1.10/tcp/4001, or say --port 4001",
    ),
    # The invite
    "invite-fine": _ok("it leads to run {run}, by way of {names}"),
    "invite-stored": _ok("none was given: the folder knows its run"),
    "invite-none": _warning("none was given, and the folder knows no run", "give one: farandole doctor farandole1..."),
    "invite-empty": _failed("it names run {run}, and no peer to dial", _NEWER_INVITE),
    "invite-manifest": _ok("it is the manifest of run {run}, for its first node, which has no peers to ask"),
    "invite-manifest-damaged": _failed(
        "{path} is no manifest that can be read: {why}",
        "copy the file again; a run file becomes a manifest by farandole run create",
    ),
    "invite-damaged": _failed(
        "{why}", "copy the whole line again, from the first letter to the last; or " + _NEWER_INVITE
    ),
    "invite-other-version": _failed(
        "{why}", "upgrade farandole where it is older, here or where the invite was made: docs/volunteer.md#upgrade"
    ),
    "invite-address": _failed("{why}", "copy the whole address again: it ends in /p2p/ and a peer id"),
    "invite-other-run": _failed(
        "it is for another run than {home}, which belongs to run {run}",
        "join that one with a new folder: --home FOLDER",
    ),
    "invite-store-damaged": _failed(
        "{store} is damaged: {why}", "remove it: the node gets its content from peers again"
    ),
    # The way to peers
    "bootstrap-fine": _ok("{address} answers"),
    "bootstrap-behind-relay": _failed(
        "{address}: the relay's address answers, and the peer cannot be reached through it",
        "the relay or the peer behind it may have gone; " + _NEWER_INVITE,
    ),
    "bootstrap-none": _skipped("no address of a peer is known", "give an invite, or --bootstrap"),
    "bootstrap-offline": _failed(
        "this machine has no route to the internet", "connect it to a network, then try again"
    ),
    "bootstrap-refused": _failed(
        "{address} refuses: the machine is on, and no node listens there",
        "ask its owner to start the node again; " + _FIND_AGAIN,
    ),
    "bootstrap-silent": _failed(
        "{address} is silent for {seconds:g} s: it is off, this machine is offline, or a firewall drops the packets",
        "check that this machine is online; ask its owner to start it again, or to open its port; where a network lets "
        "out port 443 alone, ask for an invite with a member that listens there; " + _FIND_AGAIN,
    ),
    "bootstrap-no-route": _failed(
        "there is no way to {address}", "check that this machine is online (IPv6 may be missing)"
    ),
    "bootstrap-private": _failed(
        "{address} is of its peer's private network; from here, it may be another machine's, or no one's", WIDER_INVITE
    ),
    "bootstrap-unresolved": _failed(
        "{address} has a name that does not resolve", "check this machine's DNS server; or " + _NEWER_INVITE
    ),
    "bootstrap-login-page": _failed(
        "the name in {address} is {ips} here, which is no public address: a login page's, as in hotels and trains, or "
        "one of this network",
        "open any web page in a browser and log in; or set another DNS server",
    ),
    "bootstrap-moved": _warning("no peer that was known before answers at its last address", DIAL_MOVED),
    "bootstrap-stranger": _failed("another node than the invite says is at {address}", _FIND_AGAIN),
    "bootstrap-no-handshake": _failed("the program at {address} is not a farandole node: {why}", _NEWER_INVITE),
    "run-fine": _ok("a peer has the manifest of run {run}: {name!r}"),
    "run-needs-text": _failed(
        "this run trains on text that each node brings, and none is named",
        "name some with --data PATH, or a data set with --stream OWNER/NAME",
    ),
    "run-needs-tokenizer": _failed(
        "this run takes the tokenizer file with SHA-256 {sha256}, and none is named",
        "get it from the person who invited you, and name it with --tokenizer FILE",
    ),
    "run-tokenizer-other": _failed(
        "{path} {why}, and this run takes the tokenizer file with SHA-256 {sha256}",
        "get it from the person who invited you, and name it with --tokenizer FILE",
    ),
    "run-needs-model": _failed(
        "this run's model is code of its own, {function} of {package}, which is not allowed",
        "get that package from the person who invited you, read it, install it, and use --allow-model {function}",
    ),
    "run-needs-base": _failed(
        "this run trains adapters of a base model{why}",
        "name your copy of that model, a Hugging Face folder, with --base",
    ),
    "run-needs-package": _failed(
        "this run's {what} needs the Python package {package}, which is not installed", "{command}"
    ),
    "run-needs-line": _warning(
        "this run needs {rate} up and down, more than {caps}: {exchange}; {chances}",
        "raise {flags} to {least} or more, or leave out the cap",
    ),
    "run-none": _skipped("no run is named"),
    "run-newer": _failed("{why}", "upgrade: docs/volunteer.md#upgrade"),
    "run-unknown": _failed(
        "peers answer, and none of them is in run {run}", "the run may have ended; " + _NEWER_INVITE
    ),
    "run-untold": _skipped("{why}"),
    # What peers see
    "clock-fine": _ok("{how} compared with the peers' clocks"),
    "clock-off": _failed(
        "this machine's clock is {how}, as the clocks of {num} peers show: others accept its messages only after a "
        "delay, or never",
        SET_CLOCK,
    ),
    "clock-disputed": _warning(
        "this machine's clock is {how} compared with each peer that answers ({num}): one of the clocks is wrong",
        COMPARE_CLOCKS,
    ),
    "clock-untold": _skipped("{why}"),
    "nat-public": _ok("public: others reach this node at {seen}"),
    "nat-punchable": _ok("behind a NAT or a firewall that can be punched through (seen as {seen})"),
    "nat-symmetric": _warning(
        "symmetric NAT: each peer sees another port ({seen}), so only relays lead here", _OPEN_PORT
    ),
    "nat-relay-only": _warning("only relays lead to this node", _OPEN_PORT),
    "nat-announced-closed": _warning(
        "peers have tried the announced {announced}, and do not reach this node there",
        "have the router forward that port to the one of --port, and the firewall let it in; or correct --announce",
    ),
    "nat-announced-moved": _warning(
        "peers see this node at {seen}, and not at the announced {announced}",
        f"correct --announce; a /dns/ name follows the address. {DIAL_MOVED}",
    ),
    "nat-untold": _skipped("{why}"),
    "relay-needless": _ok("this node needs none"),
    "relay-fine": _ok("{names} can relay to this node"),
    "relay-none": _ok("none of the peers asked can relay to this node; others reach it once it has dialled them"),
    "relay-none-needed": _failed(
        "none of the peers asked can relay to this node, and no peer reaches it otherwise",
        "start a relay on a public machine and give its address with --bootstrap; or forward a port of the router, as "
        "for `nat-relay-only`",
    ),
    "relay-untold": _skipped("{why}"),
}


def check_of(cause: str) -> str:
    """Return the one of `CHECKS` that finds this cause: the first word of its name, with two exceptions."""
    first = cause.partition("-")[0]
    return "torch" if first in ("device", "gpu") else first


def found(cause: str, **details: object) -> Finding:
    """Make the finding of one of `CAUSES` with its details."""
    level, text, remedy = CAUSES[cause]
    return Finding(check_of(cause), cause, level, text.format(**details), remedy.format(**details))


def lessen(finding: Finding) -> Finding:
    """Lower a failure to a warning, where something else makes up for it."""
    return msgspec.structs.replace(finding, level=Level.WARNING) if finding.level is Level.FAILED else finding
