"""``farandole status`` on one screen: am I well, what do I do, with whom did I last exchange, is the loss falling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..base.figures import BYTES_PER_MBIT, count, duration, loss, size, sparkline
from ..status.status import (
    DataStatus,
    ExchangeStatus,
    MemberStatus,
    NodeStatus,
    PipelineStatus,
    Resources,
    TrafficStatus,
)
from . import phrases
from .headline import headline

SPARKLINE_WIDTH: Final = 40
MAX_WARNINGS_SHOWN: Final = 3
_LEVEL_STYLES: Final = {"well": "bold green", "busy": "bold cyan", "trouble": "bold red"}
_PHASE_STYLES: Final = {"failed": "bold red", "leaving": "yellow", "finished": "bold green", "training": "green"}


def status_screen(status: NodeStatus, now: float) -> RenderableType:
    """The whole answer; ``now`` is Unix time."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, value in _lines(status, now):
        grid.add_row(label, value)
    return Group(_first_line(status, now), _title(status), grid)


def _first_line(status: NodeStatus, now: float) -> Text:
    found = headline(status, now)
    text = Text(found.text, style=_LEVEL_STYLES[found.level])
    if found.remedy:
        text.append(f". {found.remedy}", style="not bold default")
    return text


def _title(status: NodeStatus) -> Text:
    title = Text()
    title.append(status.run.name or "farandole", style="bold")
    if status.run.run_id:
        title.append(f"  run {status.run.run_id[:16]}", style="dim")
    title.append("  ")
    if status.is_member:
        title.append("member", style="bold green")
    elif status.phase == "relaying":
        title.append("relay", style="bold green")
    else:
        title.append("not a member yet", style="bold yellow")
    return title


def _lines(status: NodeStatus, now: float) -> list[tuple[str, RenderableType]]:
    lines: list[tuple[str, RenderableType]] = [
        ("node", Text(status.peer_id)),
        ("up", f"{duration(now - status.started_at)} on {escape(status.device or 'no device yet')}"),
        ("doing", _phase(status, now)),
        ("waits for", Text(status.waits_for or "nothing", style="yellow" if status.waits_for else "")),
        *([("isolated", Text(status.isolation, style="yellow"))] if status.isolation else []),
        ("progress", _progress(status)),
        *([("data", _data(status.data))] if status.data else []),
        ("loss", _loss(status)),
        *([("stage", _stage(status))] if len(status.run.providers) > 1 else []),
        *([("microbatches", _microbatches(status.pipeline))] if status.pipeline else []),
        ("exchanges", _exchanges(status)),
        ("last exchange", _last_exchange(status.last_exchange, now)),
        ("the run", _run(status)),
        ("links", _links(status)),
        ("reached", phrases.reached(status)),
        ("traffic", _traffic(status)),
        *([("this month", _budget(status.traffic))] if status.traffic else []),
        *([("takes", _resources(status.resources))] if status.resources else []),
    ]
    lines += [("warning", Text(warning, style="yellow")) for warning in status.warnings[-MAX_WARNINGS_SHOWN:]]
    return lines


def _phase(status: NodeStatus, now: float) -> Text:
    text = Text(phrases.phase(status, now))
    text.stylize(_PHASE_STYLES.get(status.phase, "cyan"), 0, len(status.phase))
    if status.phase_detail:
        text.append(f": {status.phase_detail}", style="default")
    return text


def _progress(status: NodeStatus) -> str:
    return (
        f"round {status.round}, {status.inner_steps:,} inner steps ({status.inner_steps_this_round} in this round), "
        f"{count(status.tokens)} tokens at {count(status.tokens_per_second)}/s{_busy(status)}"
        + (f", {status.microbatch} sequences at a time" if status.microbatch else "")
    )


def _data(data: DataStatus) -> Text:
    text = Text(phrases.epoch(data))
    text.append(f"; {data.leased:,} of {data.slices:,} slices are this node's now")
    if data.others_texts:
        text.append(f"; {data.others_texts} nodes train on another text", style="yellow")
    return text


def _stage(status: NodeStatus) -> Text:
    providers = status.run.providers
    text = Text(f"{status.stage} of {len(providers)} (0 to {len(providers) - 1}); ")
    text.append(f"live in each: {phrases.providers(status.run)}")
    empty = [str(stage) for stage, number in enumerate(providers) if number == 0]
    if empty:
        text.append(f"; nobody holds {', '.join(empty)}", style="yellow")
    return text


def _microbatches(pipeline: PipelineStatus) -> str:
    lost = f"{pipeline.dropped} dropped"
    if pipeline.reasons:
        reason, number = max(pipeline.reasons.items(), key=lambda item: item[1])
        lost += f" ({number} of them: {reason})"
    return (
        f"{pipeline.kept:,} kept, {pipeline.in_flight} in flight, {lost}, {pipeline.rerouted} sent another way; "
        f"{size(pipeline.bytes_sent)} sent, {size(pipeline.bytes_received)} received"
    )


def _busy(status: NodeStatus) -> str:
    if status.utilisation is None:
        return ""
    late = f", outer step {status.late_steps} inner steps late" if status.late_steps else ""
    return f", {status.utilisation:.0%} of the time in inner steps{late}"


def _loss(status: NodeStatus) -> Text:
    if status.loss is None:
        return Text(phrases.unknown_loss(status), style="dim")
    text = Text(loss(status.loss), style="bold")
    text.append(f" from {loss(status.loss_first)}  " if status.loss_first is not None else "  ", style="not bold")
    text.append(sparkline([value for _, value in status.losses], SPARKLINE_WIDTH), style="cyan")
    if found := phrases.validation(status):
        text.append(f"\n{found}", style="not bold")
    return text


def _exchanges(status: NodeStatus) -> str:
    paths = ", ".join(f"{number} {_PATHS[path].strip()}" for path, number in status.paths.items() if path in _PATHS)
    return (
        f"{status.exchanges_ok} committed with {len(status.partners)} partners{f' ({paths})' if paths else ''}, "
        f"{status.exchanges_alone} alone, "
        f"{status.exchanges_failed} failed; {size(status.bytes_sent)} sent, {size(status.bytes_received)} received"
    )


_PATHS = {"bulk": " over a channel of their own", "stream": " over libp2p's stream"}


def _last_exchange(exchange: ExchangeStatus | None, now: float) -> Text:
    if exchange is None:
        return Text("none yet", style="dim")
    text = Text(f"round {exchange.round}")
    if exchange.partner:
        text.append(f" with {exchange.partner[-8:]}")
    text.append(": ")
    text.append(exchange.verdict, style="green" if exchange.verdict == "committed" else "yellow")
    if exchange.partner:
        text.append(
            f", {size(exchange.bytes_sent)} sent, {size(exchange.bytes_received)} received in "
            f"{duration(exchange.seconds)}{_PATHS.get(exchange.path, '')}"
        )
    text.append(f", {duration(now - exchange.ended_at)} ago")
    return text


def _run(status: NodeStatus) -> str:
    run = status.run
    return (
        f"{phrases.company(run)}; {phrases.work_of_all(run)}; loss {loss(run.loss_mean)} "
        f"({loss(run.loss_min)} to {loss(run.loss_max)})"
    )


def _links(status: NodeStatus) -> str:
    kinds = Counter(member.path or "unknown" for member in status.members if member.is_connected)
    detail = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return f"{status.connected_peers} peers connected" + (f" (members: {detail})" if detail else "")


def _traffic(status: NodeStatus) -> str:
    sent = _flow(status.bytes_sent_per_second, status.upload_mbit)
    received = _flow(status.bytes_received_per_second, status.download_mbit)
    return f"sends {sent}; receives {received}"


def _budget(traffic: TrafficStatus) -> str:
    text = f"{size(traffic.used)} of {size(traffic.limit)} moved"
    if traffic.is_saved:
        text += f", exchanges wait until {datetime.fromtimestamp(traffic.resumes_at):%a %d %b %H:%M}"
    return text


def _resources(resources: Resources) -> str:
    return f"{phrases.memory(resources)}; {resources.descriptors} descriptors, {resources.tasks} tasks"


def _flow(bytes_per_second: float, cap_mbit: float) -> str:
    cap = f"at most {cap_mbit:g}" if cap_mbit else "no cap"
    return f"{bytes_per_second / BYTES_PER_MBIT:.2f} Mbit/s ({cap})"


def members_table(members: list[MemberStatus], providers: Sequence[int] = ()) -> Table:
    """``farandole peers``: one line a member of the run, and one with the ``providers`` of each stage if several."""
    has_stages = len(providers) > 1
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    numbers = ("stage", "round", "steps", "tokens", "tokens/s", "loss", "seen")
    columns = ("peer", "state", "round", "steps", "tokens", "tokens/s", "loss", "link", "seen", "device")
    for column in (*columns[:2], *(("stage",) if has_stages else ()), *columns[2:]):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for member in members:
        table.add_row(
            member.peer_id[-8:],
            _member_state(member),
            *((str(member.stage),) if has_stages else ()),
            str(member.round),
            f"{member.inner_steps:,}",
            count(member.tokens),
            count(member.tokens_per_second),
            loss(member.loss),
            "this node" if member.is_self else member.path if member.is_connected else "-",
            "-" if member.last_seen_seconds is None else duration(member.last_seen_seconds),
            escape(member.device),
        )
    if has_stages:
        table.caption = "live in each stage: " + ", ".join(
            f"{number} in {stage}" for stage, number in enumerate(providers)
        )
        table.caption_justify = "left"
    return table


def _member_state(member: MemberStatus) -> Text:
    if member.has_left:
        return Text("left", style="dim")
    if member.is_live and member.is_paused:
        return Text("paused", style="yellow")
    return Text("live", style="green") if member.is_live else Text("gone", style="red")
