"""Phrases about a status: the text that ``status`` and ``status --watch`` share, each in its own layout."""

from __future__ import annotations

from ..base.figures import count, duration, loss, size
from ..status.status import DataStatus, NodeStatus, Resources, RunStatus

_WAYS = {"unknown": "not known yet", "public": "directly", "punchable": "by hole punching"}


def phase(status: NodeStatus, now: float) -> str:
    """The phase, and for how long; ``now``: Unix seconds."""
    return f"{status.phase} for {duration(now - status.phase_since)}"


def unknown_loss(status: NodeStatus) -> str:
    """Why there is no loss to show."""
    return "known to stage 0" if status.stage else "not measured yet"


def validation(status: NodeStatus) -> str:
    """The newest validation loss; empty if there is none."""
    if not status.validation:
        return ""
    round_index, value = status.validation[-1]
    return f"{loss(value)} on held-out text after round {round_index}"


def company(run: RunStatus) -> str:
    """How many members there are."""
    return f"{run.members_live} live, {run.members_gone} gone"


def work_of_all(run: RunStatus) -> str:
    """Tokens that all members trained on, and how fast."""
    return f"{count(run.tokens)} tokens at {count(run.tokens_per_second)}/s"


def providers(run: RunStatus) -> str:
    """Live members of each stage, in order."""
    return ", ".join(map(str, run.providers))


def epoch(data: DataStatus) -> str:
    """How far the present epoch is."""
    return f"epoch {data.epoch} of {data.epochs}, {data.done / data.slices:.1%} of it done by all nodes"


def busy_share(status: NodeStatus) -> str:
    """Share of the trainer's time in inner steps, of the last few rounds if known; empty if none is."""
    share = status.utilisation if status.recent_utilisation is None else status.recent_utilisation
    return "" if share is None else f"{share:.0%} of the time in inner steps"


def memory(taken: Resources) -> str:
    """Memory of the node and of its trainer."""
    trainer = "" if taken.trainer_memory is None else f", its trainer {size(taken.trainer_memory)}"
    return f"{size(taken.memory)} of memory{trainer}"


def gpu_memory(taken: Resources) -> str:
    """Memory of the GPU; empty without one."""
    if taken.device_memory is None:
        return ""
    of_all = "" if taken.device_memory_total is None else f" of {size(taken.device_memory_total)}"
    return f"GPU memory {size(taken.device_memory)}{of_all}"


def reached(status: NodeStatus, *, names_relays: bool = True) -> str:
    """How others reach this node, and for whom it relays."""
    text = _WAYS.get(status.reachability, "not directly")
    if status.relays:
        names = f": {', '.join(relay[-8:] for relay in status.relays)}" if names_relays else ""
        text += f"; through {len(status.relays)} relays{names}"
    if status.relayed_peers:
        text += f"; is a relay for {status.relayed_peers} peers, {status.relayed_circuits} pairs of which talk now"
    return text
