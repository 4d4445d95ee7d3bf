"""``farandole run plan``: settings of a run that suit its members' machines and lines."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole.protocol.wire.errors import ManifestError

from ...base.exits import Exit
from ...base.figures import count, duration, mbit, parse_rate, parse_size, size
from ...base.settings import NodeSettings
from .options import AsJson, reader_of, takes_settings
from .output import print_json

if TYPE_CHECKING:
    from farandole.protocol.planning.planning import Machine, Plan
    from farandole.protocol.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class _Model:
    """The run to plan: one with default settings, or the one that a run file describes."""

    manifest: Manifest
    given: frozenset[str]
    """Settings that the plan does not change, such as ``outer.codec``."""
    table: dict[str, Any] | None
    """The section ``[model]`` of a new run file; None if there is a run file."""


@takes_settings("allow_model")
def plan_run(
    settings: NodeSettings,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN.TOML", help="A preset such as 125M, hf:FOLDER, or a run file.")
    ],
    upload: Annotated[
        float,
        typer.Option(
            "--upload", parser=reader_of(parse_rate), metavar="RATE", help="The slowest member's upload rate."
        ),
    ] = "20Mbit",  # type: ignore[assignment]  # typer parses it
    download: Annotated[
        float | None,
        typer.Option(
            "--download",
            parser=reader_of(parse_rate),
            metavar="RATE",
            help="The slowest member's download rate.",
            show_default="as --upload",
        ),
    ] = None,
    gpu: Annotated[
        float | None,
        typer.Option(
            "--gpu", parser=reader_of(parse_size), metavar="SIZE", help="Memory of each GPU.", show_default="no GPU"
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory", parser=reader_of(parse_size), metavar="SIZE", help="Memory of each machine.", show_default="any"
        ),
    ] = None,
    lean: Annotated[
        bool,
        typer.Option("--lean", help="Plan for members that join with --lean (half of the GPU memory for weights)."),
    ] = False,
    members: Annotated[
        int | None,
        typer.Option("--members", min=1, metavar="N", help="Number of members; limits the stages to half of it."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="RUN.TOML", help="Write the run file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run file that is there, without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find settings with which a model of this size fits members' memory and lines, before a run is signed.

    What a run file says stays as it is. The rest is chosen by measurements, with the reason for each. Exit code 1 if
    nothing fits.

    Examples: [cyan]farandole run plan 125M --upload 20Mbit[/cyan];
    [cyan]farandole run plan 350M --gpu 24GB --upload 20Mbit --out run.toml[/cyan];
    [cyan]farandole run plan 1B --gpu 24GB --upload 40Mbit --members 8[/cyan];
    [cyan]farandole run plan 1B --gpu 16GB --lean[/cyan];
    [cyan]farandole run plan run.toml --upload 10Mbit[/cyan] (what would that need?)
    """
    from farandole.protocol.planning.planning import Machine, best_known, plan

    planned = _read(model, settings.allow_model)
    machine = Machine(
        upload,
        download or upload,
        None if memory is None else int(memory),
        None if gpu is None else int(gpu),
        is_lean=lean,
    )
    best = plan(best_known(planned.manifest, planned.given), machine, planned.given, members)
    try:
        if as_json:
            print_json(_as_json(best, planned, machine))
        else:
            typer.echo("\n".join(_lines(best, planned, machine)))
    finally:  # also where a pipe's reader ends early
        if out is not None and best.fits:
            _write(out, planned, best, force=force)
    if out is not None and best.fits and not as_json:
        typer.echo(f"{out} is written; sign it with: farandole run create {out}")
    if not best.fits:
        raise typer.Exit(Exit.NOT_WELL)


def _read(model: str, allowed_models: Sequence[str]) -> _Model:
    from farandole.protocol.planning.planning import given_by

    from ...base.config.toml_file import read_toml
    from ...store.run_file import manifest_of, manifest_of_file

    if model.endswith(".toml"):
        file = read_toml(Path(model))
        return _Model(manifest_of_file(file, time.time(), allowed_models), given_by(file.values), None)
    name = re.sub(r"[^\w .:+-]", "-", Path(model.removeprefix("hf:")).name or model)[:64]
    is_folder = model.startswith("hf:")
    table = {"hf": str(Path(model.removeprefix("hf:")).absolute())} if is_folder else {"preset": model}
    return _Model(manifest_of({"name": name, "model": table}, Path(), time.time()), frozenset(), table)


def _lines(best: Plan, planned: _Model, machine: Machine) -> list[str]:
    """Return the plan as lines of text for users."""
    import msgspec

    from farandole.protocol.planning.needs import TRANSFER_SHARE
    from farandole.protocol.planning.planning import LINE_SHARE, choices, judge
    from farandole.protocol.run.models import num_parameters

    from ...base.requirements import settings_with_reasons

    manifest, needs = best.manifest, best.needs
    memory, has_gpu = machine.memory_of(needs), machine.gpu is not None
    rounds, stages = manifest.rounds, manifest.model.num_stages
    has = [f"{mbit(machine.upload)} up, {mbit(machine.download)} down"]
    has += [f"a GPU with {size(machine.gpu)}"] if machine.gpu is not None else []
    has += [f"{size(machine.memory)} of memory"] if machine.memory is not None else []
    chosen = settings_with_reasons(choices(planned.manifest, manifest, planned.given))
    lacks = [name for name, is_lacking in (("line", best.lacks_line), ("memory", best.lacks_memory)) if is_lacking]
    verdict = f"does not fit (too little {' and '.join(lacks)}); nearest:" if lacks else "fits, with"
    unchanged = "" if chosen else " the settings as they are"
    lines = [
        f"{manifest.name}: {count(num_parameters(manifest.model))} parameters; each member has {', '.join(has)}",
        f"{verdict}{unchanged}",
        *(f"  {line}" for line in chosen),
        "",
        f"exchange  {size(needs.contribution_bytes)} each way: {duration(best.seconds)} with {LINE_SHARE:.0%} of the "
        f"line; with a late partner it has {duration(needs.transfer_seconds)} ({TRANSFER_SHARE:.0%} of "
        f"exchange_seconds), for which {mbit(needs.rate)} are needed",
    ]
    if best.busy is not None:
        times = "once" if rounds.partners == 1 else f"{rounds.partners} times"
        lines.append(
            f"rounds    every parameter is averaged {times} in {duration(best.period)}; trainers are in inner steps "
            f"up to {best.busy:.0%} of the time"
        )
        hourly = 3_600 / best.period * manifest.outer.fragments * rounds.partners * needs.contribution_bytes
        far = f", of which {size(hourly / rounds.far_every)} with far members" if rounds.far_every > 1 else ""
        lines.append(f"traffic   {size(hourly)} an hour each way for exchanges{far}")
    where = f"{size(memory.device)} on the GPU and {size(memory.host)} of host memory" if has_gpu else size(memory.host)
    lines += [
        f"memory    {where}, for one sequence at a time",
        f"disk      {size(needs.disk_bytes)}",
        f"joining   {size(needs.join_bytes)}: {duration(needs.join_bytes / machine.download)}",
    ]
    if stages > 1:
        share = 1 - min(best.seconds / rounds.round_seconds, 1.0) if rounds.round_seconds else 1.0
        tokens = LINE_SHARE * share * machine.rate / needs.hop_bytes
        model = msgspec.structs.replace(planned.manifest.model, num_stages=1, stage_layers=())
        whole = judge(msgspec.structs.replace(manifest, model=model), machine).needs
        uncut = machine.memory_of(whole)
        lines.append(
            f"stages    {stages}, the largest with {count(needs.num_parameters)} parameters; each token takes "
            f"{size(needs.hop_bytes)} of a member's line up, so at most {count(tokens)} tokens/s pass through one "
            f"(uncut, the model takes {size(uncut.device if has_gpu else uncut.host)})"
        )
    return lines


def _as_json(best: Plan, planned: _Model, machine: Machine) -> dict[str, Any]:
    """Return the plan for scripts: rates in bytes a second, times in seconds, sizes in bytes."""
    from dataclasses import asdict

    from farandole.protocol.planning.planning import choices, reason_for

    settings = choices(planned.manifest, best.manifest, planned.given)
    return {
        "fits": best.fits,
        "settings": settings,
        "reasons": {name: reason_for(name, value) for name, value in settings.items()},
        "needs": {**asdict(best.needs), "rate": best.needs.rate, "least_rate": best.needs.least_rate},
        "machine": asdict(machine),
        "exchange_seconds": best.seconds,
        "period": None if best.busy is None else best.period,
        "busy": best.busy,
        "lacks_line": best.lacks_line,
        "lacks_memory": best.lacks_memory,
    }


def _write(path: Path, planned: _Model, best: Plan, *, force: bool) -> None:
    """Write a run file that says the plan. Asks before it replaces one."""
    from farandole.protocol.planning.planning import changes, reason_for

    if planned.table is None:
        raise ManifestError("there is a run file already: write the settings above into it, and leave out --out")
    if (
        path.exists()
        and not force
        and not (sys.stdin.isatty() and typer.confirm(f"{path} is there already. Replace it?"))
    ):
        raise ManifestError(f"{path} is there already; --force replaces it, --out writes elsewhere")
    sections: dict[str, dict[str, Any]] = {"model": planned.table, "inner": {}, "outer": {}, "rounds": {}}
    outer, rounds = best.manifest.outer, best.manifest.rounds
    settings = {  # whole, since `run create` chooses what a run file leaves open for another line
        **changes(planned.manifest, best.manifest),
        "outer.kind": outer.kind,
        "outer.codec": outer.codec,
        "outer.fragments": outer.fragments,
        "rounds.round_seconds": rounds.round_seconds,
        "rounds.exchange_seconds": rounds.exchange_seconds,
        "rounds.overlap": rounds.overlap,
    }
    for name, value in settings.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    lines = [f"name = {json.dumps(planned.manifest.name)}"]
    for name, values in sections.items():
        lines += ["", f"[{name}]"]
        for field, value in values.items():
            reason = reason_for(f"{name}.{field}", value) if f"{name}.{field}" in settings else ""
            lines.append(f"{field} = {json.dumps(value)}" + f"  # {reason}" * bool(reason))
    head = "# Made by `farandole run plan`. examples/run.toml explains all settings, [data] and [inner] among them."
    try:
        path.write_text("\n".join([head, "", *lines, ""]))
    except OSError as error:
        raise ManifestError(f"cannot write {path}: {error.strerror}") from error
