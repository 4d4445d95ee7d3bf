"""Every cause that the doctor can name: how bad it is, what people read, and what they can do.

A name begins with its check's; names stay, since scripts rely on them. In braces: what a check has found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from .finding import Finding, Level


@dataclass(frozen=True, slots=True)
class Cause:
    """The texts of one cause."""

    check: str
    level: Level
    found: str
    remedy: str = ""


_OK, _WARNING, _FAILED, _SKIPPED = Level.OK, Level.WARNING, Level.FAILED, Level.SKIPPED
_NEWER_INVITE: Final = "ask for a newer invite: any member can make one (`farandole run invite`)"

CHECKS: Final = {
    "home": "the node's folder",
    "node": "the node that runs with it, if one does",
    "key": "its key, which is its identity",
    "disk": "room for checkpoints",
    "torch": "PyTorch and the device",
    "data": "text of your own, and data sets that are streamed",
    "model": "code of your own that may make the run's model",
    "port": "the addresses to listen on",
    "invite": "the invite, or the run that the folder knows",
    "dns": "names in addresses",
    "egress": "whether a firewall lets TCP out",
    "bootstrap": "the peers of the invite, each dialled",
    "run": "whether a peer is in the run",
    "clock": "this machine's clock beside the peers'",
    "udp": "whether UDP gets out and back",
    "nat": "how others reach this machine",
    "upnp": "whether the router opens ports",
    "relay": "whether somebody relays to this node",
    "speed": "the line to a peer (`--bandwidth`)",
}
"""What is looked at, in the order of the report."""

CAUSES: Final = {
    # The folder
    "home-fine": Cause("home", _OK, "{home} can be written to"),
    "home-missing": Cause("home", _OK, "{home} is not there yet, and can be made"),
    "home-unwritable": Cause(
        "home", _FAILED, "{home} cannot be written to: {why}", "name a folder of yours with --home or FARANDOLE_HOME"
    ),
    "node-running": Cause("node", _OK, "a node runs with this folder: it is {kind}"),
    "node-silent": Cause(
        "node",
        _WARNING,
        "a process holds this folder's key and does not answer",
        "wait a moment; else end it, or give this one a folder of its own with --home",
    ),
    "node-none": Cause("node", _OK, "no node runs with this folder"),
    "key-fine": Cause("key", _OK, "{key} is whole, and nobody else's to read"),
    "key-missing": Cause("key", _OK, "there is no key yet: the first `farandole join` makes one"),
    "key-unreadable": Cause("key", _FAILED, "{key} cannot be read: {why}", "make it yours: chown $USER {key}"),
    "key-broken": Cause(
        "key",
        _FAILED,
        "{key} is no key: {size} bytes instead of {wanted}",
        "restore it from a copy; or remove it, and the node gets a new identity",
    ),
    "key-readable-by-others": Cause("key", _FAILED, "{key} can be read by others (mode {mode})", "chmod 600 {key}"),
    "disk-fine": Cause("disk", _OK, "{free} free"),
    "disk-small": Cause(
        "disk",
        _WARNING,
        "{free} free: little for a model's checkpoints",
        "make room, or name a folder on another disk with --home",
    ),
    "disk-nearly-full": Cause(
        "disk",
        _FAILED,
        "only {free} free where {home} is",
        "make room, or name a folder on another disk with --home",
    ),
    "disk-full": Cause(
        "disk",
        _FAILED,
        "the disk of {home} is full ({free} free)",
        "make room, or name a folder on another disk with --home",
    ),
    # The machine
    "torch-fine": Cause("torch", _OK, "PyTorch {version} computes on {device}"),
    "torch-slow": Cause(
        "torch", _WARNING, "PyTorch has not started within {seconds:g} s", "try again: the disk reads faster then"
    ),
    "torch-broken": Cause(
        "torch", _FAILED, "PyTorch cannot be used: {why}", "install it anew: pip install --force-reinstall torch"
    ),
    "device-missing": Cause("torch", _FAILED, "PyTorch {version}: {why}", "say --device auto, or --device cpu"),
    "gpu-unused": Cause(
        "torch",
        _WARNING,
        "there is an NVIDIA GPU, but PyTorch {version} computes on {device}",
        "install a PyTorch with CUDA that fits the driver: https://pytorch.org/get-started",
    ),
    "data-none": Cause("data", _OK, "no text of your own is named: a run that asks for it needs --data or --stream"),
    "data-fine": Cause("data", _OK, "{path} can be read"),
    "data-empty": Cause("data", _FAILED, "there is nothing to read in {path}", "point --data at text"),
    "data-unreadable": Cause("data", _FAILED, "{path} cannot be read: {why}", "point --data at text that you may read"),
    "data-stream": Cause("data", _OK, "{name} can be streamed, if the Hugging Face Hub has it"),
    "data-no-stream": Cause(
        "data",
        _FAILED,
        "{name} is no folder, and no data set's name",
        "say --stream OWNER/NAME, or OWNER/NAME:CONFIG, as on the Hugging Face Hub",
    ),
    "data-no-package": Cause(
        "data",
        _FAILED,
        "to stream {name} takes the Python package {package}, which is not installed",
        "pip install 'farandole[data]'",
    ),
    "data-two-kinds": Cause(
        "data", _FAILED, "both --data and --stream are given, which are two kinds of text", "name one of them"
    ),
    "model-none": Cause("model", _OK, "no code is allowed: a run with a model of its own needs --allow-model"),
    "model-fine": Cause("model", _OK, "{function} is installed, of {package}, and allowed"),
    "model-no-function": Cause(
        "model", _FAILED, "{function} is no function's name", "say --allow-model PACKAGE.MODULE:FUNCTION"
    ),
    "model-missing": Cause(
        "model",
        _FAILED,
        "{function} is allowed, and there is no module {module} here",
        "install its package beside farandole, with the same Python",
    ),
    "port-fine": Cause("port", _OK, "{address} is free"),
    "port-ours": Cause("port", _OK, "{address} is taken, by the node that runs here as it seems"),
    "port-taken": Cause(
        "port",
        _FAILED,
        "{address} is taken by another program",
        "choose another port: --listen /ip4/0.0.0.0/tcp/4001, or 0 for any that is free",
    ),
    "port-forbidden": Cause(
        "port", _FAILED, "{address} is not yours to listen on", "choose a port above 1023, or allow this one to you"
    ),
    "port-unusable": Cause(
        "port", _FAILED, "cannot listen on {address}: {why}", "say an address of this machine, or 0.0.0.0 for all"
    ),
    "port-no-address": Cause(
        "port", _FAILED, "{address} is no address to listen on", "say --listen /ip4/0.0.0.0/tcp/4001"
    ),
    # The invite
    "invite-fine": Cause("invite", _OK, "it leads to run {run}, by way of {names}"),
    "invite-stored": Cause("invite", _OK, "none was given: the folder knows its run"),
    "invite-none": Cause(
        "invite", _WARNING, "none was given, and the folder knows no run", "give one: farandole doctor farandole1..."
    ),
    "invite-empty": Cause("invite", _FAILED, "it names run {run}, and nobody to dial", _NEWER_INVITE),
    "invite-no": Cause("invite", _FAILED, "{why}", "copy the whole line, from the first letter to the last"),
    "invite-damaged": Cause("invite", _FAILED, "{why}", "copy the whole line again, or " + _NEWER_INVITE),
    "invite-other-version": Cause(
        "invite", _FAILED, "{why}", "bring farandole up to date here, or there: both need the same version"
    ),
    "invite-address": Cause("invite", _FAILED, "{why}", "an address to dial ends in /p2p/ and a peer id"),
    "invite-other-run": Cause(
        "invite",
        _FAILED,
        "it is for another run than {home} belongs to ({run})",
        "give that run a folder of its own with --home",
    ),
    "invite-store-damaged": Cause("invite", _FAILED, "{store} is damaged: {why}", "remove it: peers have all of it"),
    # The way to peers
    "dns-fine": Cause("dns", _OK, "{name} is {ips}"),
    "dns-none": Cause("dns", _OK, "no name is to be resolved"),
    "dns-unresolved": Cause(
        "dns", _FAILED, "{name} does not resolve: {why}", "check this machine's DNS server; or " + _NEWER_INVITE
    ),
    "egress-fine": Cause("egress", _OK, "TCP gets out, to ports {ports}"),
    "egress-only-443": Cause(
        "egress",
        _WARNING,
        "a firewall lets TCP out to port 443 alone",
        "ask for an invite with a member that listens on port 443; or use a network that lets more out",
    ),
    "egress-offline": Cause("egress", _FAILED, "this machine has no way to the internet", "connect it to a network"),
    "egress-silent": Cause(
        "egress",
        _WARNING,
        "nothing answers, on any port",
        "check that this machine is online; if it is, those peers are off: " + _NEWER_INVITE,
    ),
    "egress-untold": Cause("egress", _SKIPPED, "there is nobody to dial"),
    "bootstrap-fine": Cause("bootstrap", _OK, "{address} answers"),
    "bootstrap-behind-relay": Cause(
        "bootstrap",
        _FAILED,
        "{address}: something listens where the relay should be, and leads to no such peer",
        "the relay or the peer behind it may have gone; " + _NEWER_INVITE,
    ),
    "bootstrap-none": Cause("bootstrap", _SKIPPED, "nobody to dial is known", "give an invite, or --bootstrap"),
    "bootstrap-refused": Cause(
        "bootstrap",
        _FAILED,
        "{address} refuses: the machine is on, and no node listens there",
        "start that node again; or " + _NEWER_INVITE,
    ),
    "bootstrap-silent": Cause(
        "bootstrap",
        _FAILED,
        "{address} is silent for {seconds:g} s: it is off, or a firewall drops what comes there",
        "start it again, or open its port; or " + _NEWER_INVITE,
    ),
    "bootstrap-filtered": Cause(
        "bootstrap",
        _FAILED,
        "{address}: this network's firewall lets nothing out to port {port}",
        "ask for an invite with a member that listens on port 443",
    ),
    "bootstrap-no-route": Cause(
        "bootstrap", _FAILED, "there is no way to {address}", "check that this machine is online (IPv6 may be missing)"
    ),
    "bootstrap-private": Cause(
        "bootstrap",
        _FAILED,
        "{address} is of a private network, to which there is no way from here",
        "ask for an invite with public or relayed addresses",
    ),
    "bootstrap-unresolved": Cause(
        "bootstrap", _FAILED, "{address} has a name that does not resolve", "see dns; or " + _NEWER_INVITE
    ),
    "bootstrap-stranger": Cause(
        "bootstrap", _FAILED, "another node than the invite says is at {address}", _NEWER_INVITE
    ),
    "bootstrap-no-handshake": Cause(
        "bootstrap", _FAILED, "what is at {address} is no node of farandole: {why}", _NEWER_INVITE
    ),
    "run-fine": Cause("run", _OK, "a peer has the manifest of run {run}: {name!r}"),
    "run-needs-text": Cause(
        "run", _WARNING, "it trains on text that each node brings, and none is named", "name some: --data or --stream"
    ),
    "run-needs-tokenizer": Cause(
        "run",
        _WARNING,
        "it takes the tokenizer file with SHA-256 {sha256}, and none is named",
        "get it from whoever invited you, and say --tokenizer FILE",
    ),
    "run-needs-model": Cause(
        "run",
        _WARNING,
        "its model is code of its own, {function} of {package}, which is not allowed",
        "get that package from whoever invited you, look at it, install it, and say --allow-model {function}",
    ),
    "run-none": Cause("run", _SKIPPED, "no run is named"),
    "run-newer": Cause("run", _FAILED, "{why}", "upgrade: docs/volunteer.md#upgrade"),
    "run-unknown": Cause(
        "run", _FAILED, "peers answer, and none of them is in run {run}", "the run may have ended; " + _NEWER_INVITE
    ),
    "run-untold": Cause("run", _SKIPPED, "no peer is connected"),
    # What peers see
    "clock-fine": Cause("clock", _OK, "{how} of what peers say"),
    "clock-slightly-off": Cause(
        "clock", _WARNING, "{how} of what peers say", "set it by NTP: timedatectl set-ntp true"
    ),
    "clock-off": Cause(
        "clock",
        _FAILED,
        "{how} of what peers say: others would refuse what this node signs",
        "set it by NTP: timedatectl set-ntp true",
    ),
    "clock-disputed": Cause(
        "clock", _WARNING, "two peers' clocks are {apart} apart: which is right cannot be told", "check the time here"
    ),
    "clock-untold": Cause("clock", _SKIPPED, "no peer tells the time"),
    "udp-fine": Cause("udp", _OK, "datagrams come back"),
    "udp-blocked": Cause(
        "udp",
        _WARNING,
        "UDP is blocked: datagrams to {num} peers did not come back",
        "nothing needs doing: farandole uses TCP. To have it, let UDP out in the firewall",
    ),
    "udp-untold": Cause("udp", _SKIPPED, "no peer echoes datagrams"),
    "nat-public": Cause("nat", _OK, "public: others reach this machine at {seen}"),
    "nat-port-open": Cause("nat", _OK, "public: the router has a port open, and others reach this node at {seen}"),
    "nat-firewall": Cause("nat", _OK, "no NAT, but a firewall lets in answers alone; others punch through ({seen})"),
    "nat-punchable": Cause("nat", _OK, "behind a NAT that can be punched through (seen as {seen})"),
    "nat-one-witness": Cause(
        "nat", _OK, "behind NAT (seen as {seen}); it takes two peers to tell whether it is symmetric"
    ),
    "nat-symmetric": Cause(
        "nat",
        _WARNING,
        "symmetric NAT: each peer sees another port ({seen}), so only relays lead here",
        "it works through relays; to be faster, open a port in the router and --listen on it, or switch on its UPnP",
    ),
    "nat-relay-only": Cause(
        "nat",
        _WARNING,
        "only relays lead to this node",
        "it works through relays; to be faster, open a port in the router and --listen on it, or switch on its UPnP",
    ),
    "nat-untold": Cause("nat", _SKIPPED, "no peer tells how others reach this node"),
    "upnp-fine": Cause("upnp", _OK, "the router {ip} opens ports for those who ask; outside it is {external}"),
    "upnp-double-nat": Cause(
        "upnp",
        _WARNING,
        "the router {ip} opens ports, but is itself behind NAT (as {external}): nobody outside comes to them",
        "nothing needs doing; only the provider could give this line a public address",
    ),
    "upnp-refused": Cause(
        "upnp",
        _WARNING,
        "the router {ip} opens no port: {why}",
        "allow it in the router's settings (UPnP, port sharing) to be reached directly",
    ),
    "upnp-none": Cause("upnp", _OK, "no router opens ports here ({why})"),
    "relay-needless": Cause("relay", _OK, "this node needs none"),
    "relay-fine": Cause("relay", _OK, "a reservation is to be had with {names}"),
    "relay-none": Cause(
        "relay",
        _WARNING,
        "none of the peers asked gives a reservation",
        "others reach this node once it has dialled them; a public node in the run would help",
    ),
    "relay-none-needed": Cause(
        "relay",
        _FAILED,
        "none of the peers asked gives a reservation, and nobody reaches this node otherwise",
        "start a relay on a public machine and give its address with --bootstrap; or open a port in the router",
    ),
    "speed-fine": Cause("speed", _OK, "{up} Mbit/s up and {down} Mbit/s down, to {name}"),
    "speed-slow": Cause(
        "speed",
        _WARNING,
        "{up} Mbit/s up and {down} Mbit/s down, to {name}: little for exchanges",
        "see who else uses the line; raise --upload-mbit and --download-mbit if you have set them",
    ),
    "speed-untold": Cause("speed", _SKIPPED, "no peer lets us measure now"),
    "relay-untold": Cause("relay", _SKIPPED, "no peer is connected"),
}


def found(cause: str, **details: object) -> Finding:
    """The finding of one of `CAUSES`, with what was found."""
    texts = CAUSES[cause]
    return Finding(texts.check, cause, texts.level, texts.found.format(**details), texts.remedy.format(**details))


def lessen(finding: Finding) -> Finding:
    """The same as a warning, where something else makes up for it."""
    if finding.level is not Level.FAILED:
        return finding
    return msgspec.structs.replace(finding, level=Level.WARNING)
