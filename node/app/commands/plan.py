"""``farandole run plan``: settings of a run that suit its members' machines and lines."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farandole.protocol.wire.errors import ManifestError

from ...base.errors import Exit
from ...base.figures import count, duration, mbit, parse_rate, parse_size, size
from ...base.settings import NodeSettings
from .options import AsJson, reader_of, takes_settings
from .output import print_json

if TYPE_CHECKING:
    from farandole.protocol.planning.adapters import Base
    from farandole.protocol.planning.planning import Machine, Plan

_RATE: Final[dict[str, Any]] = {"parser": reader_of(parse_rate), "metavar": "RATE"}
_SIZE: Final[dict[str, Any]] = {"parser": reader_of(parse_size), "metavar": "SIZE"}


@takes_settings("allow_model")
def plan_run(
    settings: NodeSettings,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN.TOML", help="A preset such as 125M, hf:FOLDER, or a run file.")
    ],
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora",
            min=1,
            metavar="RANK",
            show_default="the whole model",
            help="Plan adapters of this rank, of a base: 7B, 8B, 13B, 70B or hf:FOLDER.",
        ),
    ] = None,
    upload: Annotated[float, typer.Option("--upload", help="The slowest member's upload rate.", **_RATE)] = "20Mbit",  # type: ignore[assignment]  # typer parses it
    download: Annotated[
        float | None,
        typer.Option("--download", help="The slowest member's download rate.", show_default="as --upload", **_RATE),
    ] = None,
    gpu: Annotated[
        int | None, typer.Option("--gpu", help="Memory of each GPU.", show_default="no GPU", **_SIZE)
    ] = None,
    memory: Annotated[
        int | None, typer.Option("--memory", help="Memory of each machine.", show_default="any", **_SIZE)
    ] = None,
    lean: Annotated[
        bool,
        typer.Option("--lean", help="Plan for members that join with --lean (half of the GPU memory for weights)."),
    ] = False,
    members: Annotated[
        int | None,
        typer.Option("--members", min=1, metavar="N", help="Number of members; limits the stages to half of it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find settings with which a model of this size fits members' memory and lines, before a run is signed.

    Prints a run file, which says in comments why each setting was chosen and what the run needs. What a given run file
    says stays as it is. Exit code 1 if nothing fits.

    Examples: [cyan]farandole run plan 125M --upload 20Mbit[/cyan];
    [cyan]farandole run plan 350M --gpu 24GB --members 8 > run.toml[/cyan];
    [cyan]farandole run plan 1B --gpu 16GB --lean[/cyan];
    [cyan]farandole run plan 7B --lora 16 --gpu 12GB --upload 20Mbit[/cyan] (LoRA);
    [cyan]farandole run plan run.toml --upload 10Mbit[/cyan] (what would that need?)
    """
    from msgspec import to_builtins

    from farandole.protocol.planning.adapters import BASES
    from farandole.protocol.planning.planning import Machine, best_known, choices, given_by, plan

    from ...base.config.toml_file import read_toml
    from ...base.requirements import settings_with_reasons
    from ...store.run_file import ADAPTERS_INNER, USUAL_RANK, base_in, manifest_of, manifest_of_file

    base: Base | None = None
    rank = 0
    table: dict[str, Any] = {}  # the section [model] of a new run file
    given: frozenset[str] = frozenset()
    if model.endswith(".toml"):
        file = read_toml(Path(model))
        manifest, given = manifest_of_file(file, time.time(), settings.allow_model), given_by(file.values)
        if isinstance(section := file.values.get("model"), dict) and "lora" in section:
            base, rank = base_in(Path(model).parent / section["lora"]), int(section.get("rank", USUAL_RANK))
            base = replace(base, context=manifest.model.context)
    else:
        folder = model.removeprefix("hf:")
        table = {"preset": model} if folder == model else {"hf": str(Path(folder).absolute())}
        name = re.sub(r"[^\w .:+-]", "-", Path(folder).name or model)[:64]
        values: dict[str, Any] = {"name": name, "model": table}
        if lora is not None:
            if model not in BASES and "hf" not in table:
                raise ManifestError(f"the base of adapters is hf:FOLDER, or one of {', '.join(BASES)}; not {model}")
            base, rank = BASES.get(model) or base_in(Path(folder)), lora
            table = {"lora": table.get("hf", f"FOLDER-OF-{model}"), "rank": rank}
            values |= {"model": to_builtins(base.adapted(rank)), "inner": dict(ADAPTERS_INNER)}
        manifest = manifest_of(values, Path(), time.time())
    machine = Machine(upload, download or upload, memory, gpu, is_lean=lean)
    for in_4_bits in (False, True):
        taken = 0
        if base is not None:
            taken = base.weight_bytes(in_4_bits=in_4_bits) + base.kept_bytes(rank, on_gpu=gpu is not None)
        best = plan(best_known(manifest, given), machine.without(taken), given, members)
        if base is None or gpu is None or not best.lacks_memory:
            break
    chosen = choices(manifest, best.manifest, given)
    if as_json:
        needs = {**asdict(best.needs), "rate": best.needs.rate, "least_rate": best.needs.least_rate}
        lacks = {"lacks_line": best.lacks_line, "lacks_memory": best.lacks_memory}
        of_base = {} if base is None else {"base_bytes": taken, "base_in_4_bits": in_4_bits}
        found = {"fits": best.fits, "settings": chosen, "needs": needs, "exchange_seconds": best.seconds}
        print_json({**found, **lacks, **of_base})
    else:
        head = ["Made by `farandole run plan`. examples/run.toml explains all settings.", *_needs(best, machine, taken)]
        if base is not None:
            form = f"{size(base.weight_bytes())} in bf16"
            if in_4_bits:
                packed = size(base.weight_bytes(in_4_bits=True))
                form = f"{packed} in 4 bits, which members' own loops take ({form})"
            kept = f"{size(base.kept_bytes(rank, on_gpu=gpu is not None))} for one sequence of {base.context} tokens"
            head.append(f"base      of that memory {form}, and {kept}")
        lines = [f"# {line}" for line in head]
        if table:  # whole, since `run create` chooses what a run file leaves open for another line
            outer = best.manifest.outer
            whole = {"outer.kind": outer.kind, "outer.codec": outer.codec, "outer.fragments": outer.fragments}
            whole |= {"data.source": "text"} if "lora" in table else {}
            lines.append(f"name = {json.dumps(manifest.name)}")
            chosen = {**{f"model.{key}": value for key, value in table.items()}, **chosen, **whole}
        typer.echo("\n".join([*lines, *settings_with_reasons(chosen)]))
    if not best.fits:
        raise typer.Exit(Exit.NOT_WELL)


def _needs(best: Plan, machine: Machine, taken: int) -> list[str]:
    """Return in lines of text what a plan needs of a machine, and whether it has that; ``taken``: by a base."""
    import msgspec

    from farandole.protocol.planning.needs import TRANSFER_SHARE, busy_share
    from farandole.protocol.planning.planning import LINE_SHARE, judge
    from farandole.protocol.run.models import num_parameters

    manifest, needs = best.manifest, best.needs
    memory, has_gpu = machine.memory_of(needs), machine.gpu is not None
    memory = replace(memory, **({"device": memory.device + taken} if has_gpu else {"host": memory.host + taken}))
    rounds, stages = manifest.rounds, manifest.model.num_stages
    has = [f"{mbit(machine.upload)} up, {mbit(machine.download)} down"]
    has += [f"a GPU with {size(machine.gpu)}"] if machine.gpu is not None else []
    has += [f"{size(machine.memory)} of memory"] if machine.memory is not None else []
    lacks = [name for name, is_lacking in (("line", best.lacks_line), ("memory", best.lacks_memory)) if is_lacking]
    lines = [
        f"{count(num_parameters(manifest.model))} parameters; each member has {', '.join(has)}: "
        + (f"does not fit (too little {' and '.join(lacks)}); these are the nearest settings" if lacks else "fits"),
        f"exchange  {size(needs.contribution_bytes)} each way: {duration(best.seconds)} with {LINE_SHARE:.0%} of the "
        f"line; with a late partner it has {duration(needs.transfer_seconds)} ({TRANSFER_SHARE:.0%} of "
        f"exchange_seconds), for which {mbit(needs.rate)} are needed",
    ]
    if (busy := busy_share(rounds, best.seconds)) is not None:
        times = "once" if rounds.partners == 1 else f"{rounds.partners} times"
        lines.append(
            f"rounds    every parameter is averaged {times} in {duration(best.period)}; trainers are in inner steps "
            f"up to {busy:.0%} of the time"
        )
        hourly = 3_600 / best.period * manifest.outer.fragments * rounds.partners * needs.contribution_bytes
        lines.append(f"traffic   {size(hourly)} an hour each way for exchanges")
    where = f"{size(memory.device)} on the GPU and {size(memory.host)} of host memory" if has_gpu else size(memory.host)
    lines += [
        f"memory    {where}, for one sequence at a time",
        f"disk      {size(needs.disk_bytes)}",
        f"joining   {size(needs.join_bytes)}: {duration(needs.join_bytes / machine.download)}",
    ]
    if stages > 1:
        share = 1 - min(best.seconds / rounds.round_seconds, 1.0) if rounds.round_seconds else 1.0
        tokens = LINE_SHARE * share * machine.rate / needs.hop_bytes
        model = msgspec.structs.replace(manifest.model, num_stages=1, stage_layers=())
        uncut = machine.memory_of(judge(msgspec.structs.replace(manifest, model=model), machine).needs)
        lines.append(
            f"stages    {stages}, the largest with {count(needs.num_parameters)} parameters; each token takes "
            f"{size(needs.hop_bytes)} of a member's line up, so at most {count(tokens)} tokens/s pass through one "
            f"(uncut, the model takes {size(uncut.device if has_gpu else uncut.host)})"
        )
    return lines
