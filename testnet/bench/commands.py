"""``farandole testnet bench NAME``: the table of benchmarks.

Each is a module of this package with a function ``run``, whose options are the command's. The module is imported when
its command runs, so that `farandole testnet bench --help` imports neither torch nor libp2p. Benchmarks come with the
source and are left out of the wheel.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer

BENCHES: Final = {
    "exchange": ("exchange", "How fast contributions move, compared with raw sockets, libp2p, hivemind and Lattica."),
    "lines": ("lines", "How fast contributions move over several lines at once (Linux, root, nftables)."),
    "mesh": ("mesh", "What requests, streams and files cost programs that use the mesh, compared with Lattica's SDK."),
    "join": ("join", "How fast a newcomer gets its weights, compared with hivemind, and what it costs the donors."),
    "stages": ("stages", "How fast a model in stages learns, compared with torch's pipelining, and codecs' cost."),
    "save": ("saving", "What a checkpoint a round costs training, compared with a blocking torch.save."),
    "deterministic": ("deterministic", "What the setting inner.deterministic (equal bits) costs an inner step."),
    "hostile": ("hostile", "What strangers can do to a node on loopback, and how honest newcomers fare meanwhile."),
    "members": ("members", "What hostile members cost a run's loss, attack by attack, in simulation."),
    "honest": ("honest", "How often the guard refuses or clips honest members, in simulation."),
    "recipe": ("recipe", "Whether real nodes learn what the simulation of their run does."),
    "greedy": (
        "greedy",
        "Share of the rounds that greedy members get, which propose to all nodes at once; in simulation.",
    ),
    "time": ("walltime", "Seconds a round takes on home lines: pairs, all-reduce and DiLoCo's barrier, in simulation."),
    "race": (
        "race",
        "Time to a loss in homes with slow lines, compared with DiLoCo's barrier (20 minutes; Linux, root).",
    ),
    "memory": ("memory", "What a trainer holds of a GPU's memory and of the host's, compared with a plain loop."),
    "sybils": ("sybils", "What invented authors do to the run state of honest members, in simulation."),
    "zoo": ("zoo", "What hostile members cost a run of real daemons, scenario by scenario (20 minutes)."),
    "faults": ("faults", "What the faults of scenarios cost a run (3 hours; Linux, root, nftables, libfaketime)."),
    "dashboard": ("dashboard", "What a page about a large run costs its browser and the daemon (Chromium)."),
    "nat": ("nat", "How any home reaches any home, in the NAT lab (Linux, root, nftables, miniupnpd)."),
    "nat-recovery": ("nat_recovery", "How soon homes are back when relays, bootstrap peers and routers go away."),
    "large": ("large", "What a round of 125 M parameters takes on lines of 20 Mbit/s (Linux, root, 18 GB)."),
    "round-end": ("round_end", "What encoding, decoding, judging, the outer step and checkpoints take, by size."),
    "trainer": ("training", "What exchanging costs training: two nodes on one device, compared with plain PyTorch."),
}
"""Command -> module, and what it measures."""

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure one thing, compared with others (only in a copy of the repository)."
)


def command_of(name: str) -> Any:
    """Return the click command of one benchmark, with its options; typer has no public type for it."""
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command()(import_module(f".{BENCHES[name][0]}", __package__).run)
    return typer.main.get_command(program)


def _run(context: typer.Context) -> None:
    name = context.info_name or ""
    command_of(name).main(context.args, prog_name=context.command_path, standalone_mode=False)


for _name, (_, _help) in BENCHES.items():
    bench_app.command(
        _name,
        help=_help,
        add_help_option=False,  # the module has its own, with its options
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_run)
