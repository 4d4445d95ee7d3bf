"""The status as rows of text, and ``farandole status`` and ``farandole peers`` as rich draws them.

The terminal, the full screen and the page lay out the same rows. A row has a label, a value, and an emphasis. The full
screen has two narrow columns, so a row also has the lines that are shown there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Final, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ..base.causes import release_words, releases
from ..base.figures import BYTES_PER_MBIT, bits_per_byte, chart, count, duration, loss, plural, size
from ..status.status import ExchangeStatus, MemberStatus, NodeStatus, PipelineStatus, RunStatus
from .headline import headline

# Share of an epoch from which on doubted slices are shown: there are always some of members that have just come.
MUCH_DOUBTED: Final = 0.05
CURVE_WIDTH: Final = 40
MAX_WARNINGS_SHOWN: Final = 3

Emphasis = Literal["", "faint", "strong", "good", "warning", "well", "busy", "trouble"]

_PHASES: Final[dict[str, Emphasis]] = {
    "failed": "trouble",
    "leaving": "warning",
    "finished": "well",
    "training": "good",
}
_WAYS: Final = {"unknown": "not known yet", "public": "directly", "punchable": "by hole punching"}
_PATHS: Final = {"bulk": "over a channel of their own", "stream": "over libp2p's stream"}


class Row(msgspec.Struct, frozen=True):
    """One fact about a node."""

    label: str
    value: str
    emphasis: Emphasis = ""
    brief: str = ""
    """Lines for a narrow column, without the label; empty: nothing is shown there."""


def status_rows(status: NodeStatus, now: float) -> list[Row]:
    """Return the rows of a node's status; ``now``: Unix seconds by the node's clock."""
    up = duration(now - status.started_at)
    phase, waits = f"{status.phase} for {duration(now - status.phase_since)}", status.waits_for
    emphasis = _PHASES.get(status.phase, "busy")
    rows = [
        Row("node", status.peer_id),
        Row("up", f"{up} on {status.device or 'no device yet'}"),
        Row("doing", _joined(": ", phase, status.phase_detail), emphasis, f"{phase}, up {up}"),
        Row("waits for", waits or "nothing", "warning" if waits else "", f"waits for {waits}" if waits else ""),
        Row("isolated", status.isolation, "warning"),
        Row("notice", status.notice, "warning", status.notice),
    ]
    if status.phase != "relaying":  # a relay trains nothing, and is no member that knows the others' state
        rows += [*_of_training(status, now), *_of_exchanges(status, now), run_row(status.run)]
    rows += _of_links(status)
    if (traffic := status.traffic) is not None:
        until = f", exchanges wait until {datetime.fromtimestamp(traffic.resumes_at):%a %d %b %H:%M}"
        moved = f"{size(traffic.used)} of {size(traffic.limit)} moved{until if traffic.is_saved else ''}"
        rows.append(Row("this month", moved))
    if (taken := status.resources) is not None:
        trainer = "" if taken.trainer_memory is None else f", its trainer {size(taken.trainer_memory)}"
        memory, gpu = f"{size(taken.memory)} of memory{trainer}", ""
        if taken.device_memory is not None:
            of_all = "" if taken.device_memory_total is None else f" of {size(taken.device_memory_total)}"
            gpu = f"GPU memory {size(taken.device_memory)}{of_all}"
        value = f"{memory}; {taken.descriptors} descriptors, {taken.tasks} tasks"
        rows.append(Row("takes", value, brief=_joined("\n", memory, gpu)))
    rows += (Row("warning", warning, "warning") for warning in warnings_of(status, now)[-MAX_WARNINGS_SHOWN:])
    return [row for row in rows if row.value]


def warnings_of(status: NodeStatus, now: float) -> list[str]:
    """Return the warnings that stand, newest last, each with its age."""
    times = status.warned_at or [now] * len(status.warnings)
    return [f"{duration(now - at)} ago: {text}" for text, at in zip(status.warnings, times, strict=True)]


def _joined(separator: str, *parts: str) -> str:
    """Join the parts that are not empty."""
    return separator.join(part for part in parts if part)


def _of_training(status: NodeStatus, now: float) -> Iterator[Row]:
    share = status.utilisation
    busy = "" if share is None else f"{share:.0%} of the time in inner steps"
    speed = count(status.tokens_per_second)
    value = _joined(
        ", ",
        f"round {status.round}",
        f"{plural(status.inner_steps, 'inner step')} ({status.inner_steps_this_round} in this round)",
        f"{count(status.tokens)} tokens at {speed}/s",
        busy,
        f"{plural(status.microbatch, 'sequence')} at a time" if status.microbatch else "",
    )
    steps = f"{status.inner_steps_this_round}{f' of {status.round_steps}' if status.round_steps else ''} steps"
    took, limit = max(0.0, now - status.round_since), status.round_seconds
    round_now = f"round {status.round}: {steps}{f', {took:.0f} of {limit:g} s' if limit else ''}"
    brief = f"{speed} tokens/s on {status.device or 'no device yet'}"
    brief = _joined("\n", round_now if status.phase == "training" else "", brief, busy)
    yield Row("progress", value, brief=brief)
    if (data := status.data) is not None:
        epoch = f"epoch {data.epoch} of {data.epochs}, {data.done / data.slices:.1%} of it done by all nodes"
        verb = "trains" if data.others_texts == 1 else "train"
        others = f"{plural(data.others_texts, 'node')} {verb} on another text" if data.others_texts else ""
        is_much = data.doubted > MUCH_DOUBTED * data.slices
        doubted = f"{data.doubted:,} more are said to be done, and not believed yet" if is_much else ""
        leased = f"{data.leased:,} of {data.slices:,} slices are this node's now"
        yield Row("data", _joined("; ", epoch, leased, doubted, others), "warning" if others else "", epoch)
    value = brief = "known to stage 0" if status.stage else "not measured yet"
    if status.loss is None:
        yield Row("loss", value, "faint", f"loss {value}")
    else:
        since = f" from {loss(status.loss_first)}" if status.loss_first is not None else ""
        [curve] = chart([value for _, value in status.losses], CURVE_WIDTH)
        value, brief = f"{loss(status.loss)}{since}  {curve}", f"loss {loss(status.loss)} here"
        for round_index, held_out in status.validation[-1:]:
            bits = status.bits_per_byte
            value += f"\n{loss(held_out)}{bits_per_byte(bits)} on held-out text after round {round_index}"
            if bits is None:
                brief += f", held-out {loss(held_out)}"
            else:  # as short as a screen of 80 columns needs it
                brief = f"loss {loss(status.loss)}, held-out {loss(held_out)} ({bits:.3f} bpb)"
        yield Row("loss", value, "strong", brief)
    providers = status.run.providers
    if len(providers) > 1:
        live = ", ".join(map(str, providers))
        value = f"{status.stage} of {len(providers)} (0 to {len(providers) - 1}); live in each: {live}"
        empty = ", ".join(str(stage) for stage, number in enumerate(providers) if number == 0)
        value += f"; nobody holds {empty}" if empty else ""
        yield Row("stage", value, "warning" if empty else "", f"live in each stage: {live}")
    if (pipeline := status.pipeline) is not None:
        lost = f"{pipeline.dropped} dropped"
        if pipeline.reasons:
            reason, number = max(pipeline.reasons.items(), key=lambda item: item[1])
            lost += f" ({number} of them: {reason})"
        done = f"{pipeline.kept:,} kept, {pipeline.in_flight} in flight, {lost}, {pipeline.rerouted} sent another way"
        yield Row("microbatches", f"{done}; {_moved(pipeline)}")


def _of_exchanges(status: NodeStatus, now: float) -> Iterator[Row]:
    paths = ", ".join(f"{number} {_PATHS[path]}" for path, number in status.paths.items() if path in _PATHS)
    partners = plural(len(status.partners), "partner")
    committed = f"{status.exchanges_ok} committed with {partners}{f' ({paths})' if paths else ''}"
    ends = f"{committed}, {status.exchanges_alone} alone, {status.exchanges_failed} failed"
    yield Row("exchanges", f"{ends}; {_moved(status)}")
    if (exchange := status.last_exchange) is None:
        yield Row("last exchange", "none yet", "faint")
    else:
        partner = took = ""
        if exchange.partner:
            partner = f" with {status.called(exchange.partner)}"
            took = _joined(" ", f"{_moved(exchange)} in {duration(exchange.seconds)}", _PATHS.get(exchange.path, ""))
        end = _joined(", ", exchange.verdict, took, f"{duration(now - exchange.ended_at)} ago")
        emphasis: Emphasis = "good" if exchange.verdict == "committed" else "warning"
        yield Row("last exchange", f"round {exchange.round}{partner}: {end}", emphasis)
    if (audits := status.audits) is not None:
        done = f"{plural(audits.others, 'round')} of others and {audits.own} of its own replayed as committed to"
        avoided = ", ".join(f"{status.called(peer)} ({reason})" for peer, reason in audits.avoided.items())
        yield Row("audits", _joined("; not met: ", done, avoided), "warning" if avoided else "")


def _moved(counted: NodeStatus | PipelineStatus | ExchangeStatus) -> str:
    return f"{size(counted.bytes_sent)} sent, {size(counted.bytes_received)} received"


def run_row(run: RunStatus) -> Row:
    """Return the row about the run as a whole."""
    heard = f"{run.members_heard} only heard of, " if run.members_heard else ""
    left = f", {run.members_left} left" if run.members_left else ""
    company = f"{run.members_live} live, {heard}{run.members_gone} gone{left}"
    tokens, speed = count(run.tokens), count(run.tokens_per_second)
    losses = f"loss {loss(run.loss_mean)} ({loss(run.loss_min)} to {loss(run.loss_max)})"
    brief = f"loss of all {loss(run.loss_mean)}; {company}\n{speed} tokens/s, {tokens} tokens"
    return Row("the run", f"{company}; {tokens} tokens at {speed}/s; {losses}", brief=brief)


def _of_links(status: NodeStatus) -> Iterator[Row]:
    others = {name: number for name, number in status.run.versions.items() if name != status.version}
    if status.release_conflict:
        words = ": ".join(release_words(status.release_conflict, status.version))
        yield Row("releases", words, "trouble", words)
    elif others:
        number = sum(others.values())
        members = "1 member runs" if number == 1 else f"{number} members run"
        yield Row("releases", f"{members} {releases([*others], status.version)}; this node {status.version}")
    kinds = Counter(member.path or "unknown" for member in status.members if member.is_connected)
    detail = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    connected = f"{plural(status.connected_peers, 'peer')} connected"
    yield Row("links", connected + (f" (members: {detail})" if detail else ""))
    way = _WAYS.get(status.reachability, "not directly")
    relays = f"through {plural(len(status.relays), 'relay')}" if status.relays else ""
    names = ", ".join(map(status.called, status.relays))
    relayed = ""
    if status.relayed_peers:
        talking = f"{plural(status.relayed_circuits, 'pair')} talking"
        relayed = f"is a relay for {plural(status.relayed_peers, 'peer')}, {talking}"
    brief = f"reached {_joined('; ', way, relays, relayed)}"
    yield Row("reached", _joined("; ", way, _joined(": ", relays, names), relayed), brief=brief)
    sent = _flow(status.bytes_sent_per_second, status.upload_mbit)
    received = _flow(status.bytes_received_per_second, status.download_mbit)
    yield Row("traffic", f"sends {sent}; receives {received}", brief=f"up {sent}\ndown {received}")


def _flow(bytes_per_second: float, cap_mbit: float) -> str:
    return f"{bytes_per_second / BYTES_PER_MBIT:.2f} Mbit/s ({f'at most {cap_mbit:g}' if cap_mbit else 'no cap'})"


def member_state(member: MemberStatus) -> tuple[str, Emphasis]:
    """Return a member's state in words, with its emphasis."""
    if member.has_left:
        return "left", "faint"
    if member.is_live and not member.is_apart:
        return ("paused", "warning") if member.is_paused else ("live", "good")
    if member.is_apart:
        return "other release", "trouble"
    return ("heard of", "faint") if member.is_heard else ("gone", "trouble")


_NUMBERS: Final = ("stage", "round", "steps", "tokens", "tokens/s", "loss", "seen")
_WIDE_ONLY: Final = ("stage", "steps", "tokens", "tokens/s", "version", "device")
_COLUMNS: Final = ("peer", "state", *_NUMBERS[:-1], "link", "seen", "version", "device")
STYLES: Final[dict[Emphasis, str]] = {
    "": "",
    "faint": "dim",
    "strong": "bold",
    "good": "green",
    "warning": "yellow",
    "well": "bold green",
    "busy": "bold cyan",
    "trouble": "bold red",
}


def status_screen(status: NodeStatus, now: float) -> RenderableType:
    """Return the whole status: health, activity, last exchanges, loss curve.

    ``now`` is Unix time.
    """
    grid = Table.grid(Column(style="dim", no_wrap=True), Column(), padding=(0, 2))
    for row in status_rows(status, now):
        grid.add_row(row.label, Text(row.value, STYLES[row.emphasis]))
    found = headline(status, now)
    first = Text(found.sentences, STYLES[found.level])
    first.stylize("not bold default", len(found.text))
    part = "member" if status.is_member else "relay" if status.phase == "relaying" else "not a member yet"
    style = "bold yellow" if part == "not a member yet" else STYLES["well"]
    run = f"  run {status.run.run_id[:16]}" if status.run.run_id else ""
    title = Text.assemble((status.run.name or "farandole", "bold"), (run, "dim"), "  ", (part, style))
    return Group(first, title, grid)


def members_table(status: NodeStatus, *, is_narrow: bool = False) -> Table:
    """Make the table of `farandole peers`: a line for each member, then the remarks on peers, and stages' providers."""
    members, providers = status.members, status.run.providers
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    captions = [f"{status.called(peer)} {words}" for peer, words in status.remarks.items()]
    left_out = {*_WIDE_ONLY} if is_narrow else set[str]()
    left_out |= {"stage"} if len(providers) < 2 else set()
    left_out |= {"version"} if len({member.version for member in members}) < 2 else set()
    names = [name for name in _COLUMNS if name not in left_out]
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name != "peer")
    table.columns[0].min_width = 9  # a narrow terminal cuts names off, never ids
    for member in members:
        state, emphasis = member_state(member)
        cells: dict[str, Text | str] = {
            "peer": Text(status.called(member.peer_id), no_wrap=True, overflow="ellipsis"),
            "state": Text(state, STYLES[emphasis]),
            "stage": str(member.stage),
            "round": str(member.round),
            "steps": f"{member.inner_steps:,}",
            "tokens": count(member.tokens),
            "tokens/s": count(member.tokens_per_second),
            "loss": loss(member.loss),
            "link": "this node" if member.is_self else member.path if member.is_connected else "-",
            "seen": "-" if member.last_seen_seconds is None else duration(member.last_seen_seconds),
            "version": member.version or "-",
            "device": Text(member.device),
        }
        table.add_row(*(cells[name] for name in names))
    if len(providers) > 1:
        live = ", ".join(f"{number} in {stage}" for stage, number in enumerate(providers))
        captions.append(f"live in each stage: {live}")
    if captions:
        table.caption, table.caption_justify = Text("\n".join(captions)), "left"
    return table
