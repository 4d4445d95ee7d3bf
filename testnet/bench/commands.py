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
    "exchange": "How fast contributions move, compared with raw sockets, libp2p, hivemind and Lattica.",
    "join": "How fast a newcomer gets its weights, compared with hivemind, and what it costs the donors.",
    "stages": "How fast a model in stages learns, compared with torch's pipelining.",
    "save": "What a checkpoint a round costs training, compared with a blocking torch.save.",
    "trainer": "What exchanging costs training: two nodes on one device, compared with plain PyTorch.",
    "race": "Time to a loss in homes with slow lines, compared with DiLoCo's barrier (20 minutes; Linux, root).",
    "faults": "What the faults of scenarios cost a run (3 hours; Linux, root, nftables, libfaketime).",
    "nat": "How any home reaches any home, in the NAT lab (Linux, root, nftables, miniupnpd).",
    "hostile": "What strangers can do to a node on loopback, and how honest newcomers fare meanwhile.",
    "members": "What hostile members cost a run's loss, attack by attack, in simulation.",
    "attacker": "What members that have read the code cost at most: a search, in simulation (2 hours).",
    "zoo": "What hostile members cost a run of real daemons, scenario by scenario (20 minutes).",
}
"""By the name of the command, and of its module: what it measures."""

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure one thing, compared with others (only in a copy of the repository)."
)


def command_of(name: str) -> Any:
    """Return the click command of one benchmark, with its options; typer has no public type for it."""
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    program.command()(import_module(f".{name}", __package__).run)
    return typer.main.get_command(program)


def _run(context: typer.Context) -> None:
    name = context.info_name or ""
    command_of(name).main(context.args, prog_name=context.command_path, standalone_mode=False)


for _name, _help in BENCHES.items():
    bench_app.command(
        _name,
        help=_help,
        add_help_option=False,  # the module has its own, with its options
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_run)
