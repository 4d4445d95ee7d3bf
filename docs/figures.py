"""The traffic and needs of runs: the figures of ``docs/faq.md``, computed from codecs, presets and the planner.

``python docs/figures.py docs/faq.md`` writes them there.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import to_builtins

from farandole.node.base.figures import size
from farandole.node.store.run_file import ADAPTERS_INNER, manifest_of
from farandole.protocol.planning.adapters import BASES
from farandole.protocol.planning.needs import needs_of
from farandole.protocol.planning.planning import Machine, Plan, best_known, complete, plan
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.models import PRESETS, num_parameters, preset
from farandole.protocol.run.rules import encoded_bytes

CODECS: Final = ("fp32", "int8", "int4")
# Bytes of a GPU's memory, and of the host's where both are one. Metal lets a process take at least two thirds of the
# memory of a Mac with 36 GB or less (`recommendedMaxWorkingSetSize`); all else has the rest.
CARDS: Final = {
    **{size(gpu): (gpu, None) for gpu in (8 * 10**9, 12 * 10**9, 16 * 10**9, 24 * 10**9)},
    **{f"Apple, {size(both)}": (both * 2 // 3, both // 3) for both in (16 * 10**9, 32 * 10**9)},
}
# The members' line in bytes a second, and the rank of adapters.
LINE: Final = 20e6 / 8
RANK: Final = 16
# What ``run create`` makes of each preset that is not for tests alone, if a run file says nothing else.
RUNS: Final = [complete(Manifest(model, preset(model)), ()) for model in [*PRESETS][3:]]


@cache
def traffic_table() -> str:
    """Return a row for each preset: an exchange in some codecs, and what a run with the chosen settings sends."""
    heads = "".join(f" {codec} |" for codec in CODECS)
    lines = [f"| model |{heads} a round, chosen | seconds a round | in an hour | Mbit/s needed |"]
    lines.append("|---" * (len(CODECS) + 5) + "|")
    for run in RUNS:
        sizes = "".join(f" {size(encoded_bytes(codec, num_parameters(run.model)))} |" for codec in CODECS)
        needs, seconds = needs_of(run), run.rounds.round_seconds
        hourly = size(round(needs.contribution_bytes * 3_600 / seconds))
        rate = 8e-6 * needs.rate
        digits = 1 if rate >= 1 else 2
        lines.append(
            f"| `{run.name}` |{sizes} {size(needs.contribution_bytes)} | {seconds:g} | {hourly} | {rate:.{digits}f} |"
        )
    return "\n".join(lines) + "\n"


@cache
def needs_table() -> str:
    """Return a row for each preset: a member's needs, with the settings that ``run create`` chooses."""
    lines = [
        "| model | memory, without a GPU | GPU memory | host memory, with a GPU | disk | a newcomer downloads |",
        "|---" * 6 + "|",
    ]
    for run in RUNS:
        needs = needs_of(run)
        sizes = (needs.on_cpu.host, needs.on_gpu.device, needs.on_gpu.host, needs.disk_bytes, needs.join_bytes)
        lines.append(f"| `{run.name}` |" + "".join(f" {size(each)} |" for each in sizes))
    return "\n".join(lines) + "\n"


@cache
def cards_table() -> str:
    """Return a row for each size of a GPU's memory: the largest that `farandole run plan` says it can train."""
    lines = ["| GPU | whole | with `--lean` | adapters, base in bf16 | in 4 bits | `1B` |", "|---" * 6 + "|"]
    for card, (gpu, memory) in CARDS.items():

        def planned(
            manifest: Manifest, taken: int = 0, *, is_lean: bool = False, gpu: int = gpu, memory: int | None = memory
        ) -> Plan:
            machine = Machine(LINE, LINE, memory=memory, gpu=gpu - taken, is_lean=is_lean)
            return plan(best_known(manifest, ()), machine)

        cells = []
        for is_lean in (False, True):
            plans = [planned(Manifest(name, preset(name)), is_lean=is_lean) for name in PRESETS]
            cells += [best.manifest.name for best in plans if best.fits and best.manifest.model.num_stages == 1][-1:]
        for in_4_bits in (False, True):
            cells.append("none")
            if memory is not None and in_4_bits:  # bitsandbytes computes on NVIDIA's GPUs
                continue
            for name, base in BASES.items():
                values = {"name": name, "model": to_builtins(base.adapted(RANK)), "inner": dict(ADAPTERS_INNER)}
                taken = base.weight_bytes(in_4_bits=in_4_bits) + base.kept_bytes(RANK, on_gpu=True)
                if planned(manifest_of(values, Path(), 0.0), taken).fits:
                    cells[-1] = name
        stages = planned(Manifest("", preset("1B"))).manifest.model.num_stages
        lines.append(f"| {card} | {' | '.join(cells)} | {'whole' if stages == 1 else f'in {stages} stages'} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Return a page with the present tables between its comments ``begin`` and ``end`` of their names."""
    for name, table in (("traffic", traffic_table()), ("needs", needs_table()), ("cards", cards_table())):
        begin, end = (f"<!-- {edge} {name} -->" for edge in ("begin", "end"))
        head, rest = page.split(begin)
        _, tail = rest.split(end)
        page = f"{head}{begin}\n\n{table}\n{end}{tail}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
