"""``farandole testnet``: the commands that need many nodes. `farandole.node.cli` loads them by their entry point."""

from __future__ import annotations

import math
import signal
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from farandole.node.base.errors import Exit
from farandole.protocol.wire.errors import FarandoleError

if TYPE_CHECKING:
    from rich.console import Console

    from .play.report import PlayReport


testnet_app = typer.Typer(no_args_is_help=True)
if find_spec(f"{__package__}.bench") is not None:  # it is left out of the wheel
    from .bench.commands import bench_app

    testnet_app.add_typer(bench_app, name="bench")


@testnet_app.callback()
def end_as_by_ctrl_c() -> None:
    """Many nodes on this machine: a rehearsal with a verdict."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """What a command has started ends with its blocks, which the default of SIGTERM would not leave.

    An event loop takes an interrupt in its own good time, so it is asked; but what a shell starts in the background is
    made deaf to one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@testnet_app.command("run")
def run_testnet(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="A TOML file, or a name: demo, churn, unequal, overlap, stages, chaos, more in docs/testnet.md.",
            show_default="demo, or stages with --stages",
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; overrides the scenario's.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; overrides the scenario's.")] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Cut the model into this many stages, held by different nodes.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Text for all nodes, as for `join`; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json and logs.", show_default="out/SCENARIO")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run.")] = None,
    nat: Annotated[
        bool,
        typer.Option(
            "--nat", help="Put nodes behind NAT of all kinds (Linux, root, nftables); try the scenario homes."
        ),
    ] = False,
    beside_clean: Annotated[
        bool,
        typer.Option(
            "--beside-clean",
            help="Compare with the scenario without its faults, played before in OUT-clean, once.",
        ),
    ] = False,
) -> None:
    """Start real nodes as processes, cause the scenario's faults, and judge: exit code 0 only on a pass.

    Examples: [cyan]farandole testnet run demo[/cyan]; [cyan]farandole testnet run churn --out /tmp/churn[/cyan];
    [cyan]farandole testnet run --nodes 9 --stages 3[/cyan]; [cyan]farandole testnet run flap --beside-clean[/cyan]
    """
    import trio
    from rich.console import Console

    from .play.judge import judged
    from .play.launch import Testnet, play_once, write_report
    from .play.scenario import load_scenario

    scenario = scenario or ("stages" if stages else "demo")
    console = Console()
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    played = load_scenario(
        scenario, nodes=nodes, rounds=rounds, seed=seed, stages=stages, data=data or (), nat=nat, say=say
    )
    folder = out or Path("out") / Path(scenario).stem
    place = folder.absolute()
    if played.hostile is not None:
        if find_spec(f"{__package__}.zoo") is None:  # it is left out of the wheel
            raise FarandoleError("hostile members come with farandole's source alone: git clone, then make setup")
        from .zoo.play import play_hostile

        _end(play_hostile(played, place, say), folder, console)
    clean = play_once(Testnet(played.clean, place.with_name(f"{place.name}-clean"), say)) if beside_clean else None
    testnet = Testnet(played, place, say)
    report = trio.run(testnet.play)
    if clean is not None:
        report = judged(report, clean, played)
    write_report(report, folder)
    _end(report, folder, console, is_interrupted=testnet.is_interrupted)


def _end(report: PlayReport, folder: Path, console: Console, *, is_interrupted: bool = False) -> NoReturn:
    """Print the verdict, and end with its exit code."""
    from .play.report import lines_of

    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    for line in lines_of(report):
        say(line)
    for reason in report.reasons:
        say(f"  - {reason}", style="red")
    is_pass = report.verdict == "pass"
    say("PASS" if is_pass else "FAIL", style="bold green" if is_pass else "bold red")
    say(str(folder / "report.json"))
    raise typer.Exit(Exit.INTERRUPTED if is_interrupted else Exit.OK if is_pass else Exit.VERDICT_FAILED)


@testnet_app.command("compare")
def compare(
    nodes: Annotated[int, typer.Option(min=2, help="Number of replicas.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each replica.")] = 2_000,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    interval: Annotated[int, typer.Option(min=1, help="Inner steps a round.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for compare.json; results in it are reused.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Method with this name, or all that contain it; repeatable. `list` lists all, `search` tries more.",
        ),
    ] = None,
    rates: Annotated[
        str,
        typer.Option(
            help="Factors of the learning rate, separated by commas; each method has its best, found by another seed."
        ),
    ] = "1",
    baseline: Annotated[
        str, typer.Option(metavar="METHOD", help="Method to compare the others with, seed by seed.")
    ] = "DiLoCo",
    model: Annotated[
        str,
        typer.Option(
            metavar="PRESET", show_default="41 k parameters", help="Preset of the model, with a context of 32 tokens."
        ),
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(
            show_default="Python's library",
            help="Folder with a subfolder for each kind of text; each replica trains on one.",
        ),
    ] = None,
    is_mixed: Annotated[
        bool, typer.Option("--mixed-text", help="Each replica trains on all kinds of text, instead of on one.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu: one training per core. cuda: all seeds and rates of a method at once.")
    ] = "cpu",
) -> None:
    """Compare NoLoCo, DiLoCo, synchronous training and training without averaging on the same tokens, in simulation.

    Examples: [cyan]farandole testnet compare --steps 500 --seeds 1 --methods int8 --methods late[/cyan];
    [cyan]farandole testnet compare --model 0.5M --seeds 5 --rates 0.5,1,2,4 --methods DiLoCo --methods Muon[/cyan]
    """
    from .methods.compare import MethodComparison, choose_methods, run_compare

    if methods == ["list"]:
        typer.echo("\n".join(method.name for method in choose_methods([], interval)))
        return
    comparison = MethodComparison(
        nodes,
        steps,
        seeds,
        interval,
        methods or (),
        tuple(factors(rates)),
        baseline=baseline,
        model=model,
        text=text,
        is_mixed=is_mixed,
        device=device,
    )
    run_compare(comparison, out / "compare.json" if out else None)


def factors(text: str) -> list[float]:
    """Parse positive numbers with commas between them."""
    with suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        if all(0 < number < math.inf for number in numbers):
            return numbers
    raise typer.BadParameter(f"{text!r} is not a list of positive numbers, like 0.5,1,2")
