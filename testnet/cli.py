"""``farandole testnet``: the node's command line with the commands that need many nodes; the ``farandole`` script."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from farandole.node.app.commands.output import print_json
from farandole.node.base.exits import Exit
from farandole.node.cli import app, run_app_and_exit

if TYPE_CHECKING:
    from rich.console import Console

    from .report import PlayReport

Write = Annotated[
    Path | None, typer.Option("--write", metavar="DOCUMENT", help="Markdown file whose section gets the figures.")
]

testnet_app = typer.Typer(no_args_is_help=True)
app.add_typer(testnet_app, name="testnet")


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


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    run_app_and_exit(app, arguments)


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
    nodes: Annotated[int | None, typer.Option(min=1, help="How many, instead of the scenario's.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="How many, instead of the scenario's.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Cut the model into so many, held by other nodes.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, loss.png, logs.", show_default="out/SCENARIO")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the run.")] = None,
    nat: Annotated[
        bool,
        typer.Option("--nat", help="In homes behind NAT of all kinds (Linux, root, nftables); try the scenario homes."),
    ] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Without the scenario's faults, for --beside.")] = False,
    beside: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A clean play of the same scenario to compare with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON at the end.")] = False,
) -> None:
    """Start real nodes as processes, play the scenario's faults, and judge: exit code 0 only on a pass.

    Examples: [cyan]farandole testnet run demo[/cyan]; [cyan]farandole testnet run churn --out /tmp/churn[/cyan];
    [cyan]farandole testnet run --nodes 9 --stages 3[/cyan];
    [cyan]farandole testnet run chaos --clean --out out/clean[/cyan], then
    [cyan]farandole testnet run chaos --beside out/clean[/cyan]
    """
    import trio
    from rich.console import Console

    from .beside import check_clean, judged, load_report
    from .launch import Testnet, write_report
    from .live import open_view
    from .scenario import load_scenario

    scenario = scenario or ("stages" if stages else "demo")
    console = Console(stderr=as_json)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    played = load_scenario(
        scenario, nodes=nodes, rounds=rounds, seed=seed, stages=stages, nat=nat, clean=clean, say=say
    )
    clean_report = load_report(beside) if beside else None
    if clean_report is not None:
        check_clean(clean_report, str(played.run.get("name", "")), played.nodes)
    folder = out or Path("out") / Path(scenario).stem
    with open_view(console) as view:
        testnet = Testnet(played, folder.absolute(), view)
        report = trio.run(testnet.play)
    write_report(report, folder)  # whatever comes of the comparison
    if clean_report is not None:
        report = judged(report, clean_report, played)
        write_report(report, folder)
    _draw(report, folder, console)
    _print_verdict(report, folder, console)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    if testnet.is_interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    raise typer.Exit(Exit.OK if report.verdict == "pass" else Exit.VERDICT_FAILED)


def _draw(report: PlayReport, folder: Path, console: Console) -> None:
    try:
        from .plot import plot_losses
    except ImportError:
        console.print("no loss.png: matplotlib is missing (pip install 'farandole\\[testnet]')")
        return
    plot_losses(report, folder / "loss.png")


def _print_verdict(report: PlayReport, folder: Path, console: Console) -> None:
    from farandole.node.base.figures import count, duration, loss

    from .link_table import link_table

    say = partial(console.print, highlight=False, soft_wrap=True)
    exchanges = sum(node.exchanges_ok for node in report.nodes) // 2
    say(
        f"{len(report.nodes)} nodes, {count(report.tokens)} tokens in {duration(report.seconds)} "
        f"({count(report.tokens_per_second)}/s), {exchanges} exchanges"
    )
    say(
        f"training loss {loss(report.loss_first)} -> {loss(report.loss_last)}; "
        f"held-out loss {loss(report.loss_start)} -> {loss(report.loss_merged)} (mean of all replicas)"
    )
    if report.spread is not None:
        say(f"spread of the weights {report.spread:.2%}; run state {'equal' if report.state_equal else 'not equal'}")
    if shares := [node.utilisation for node in report.nodes if node.utilisation is not None]:
        moved = sum((Counter(node.paths) for node in report.nodes), Counter[str]())
        paths = ", ".join(f"{number // 2} by {path}" for path, number in sorted(moved.items()))
        say(f"trainers in inner steps {min(shares):.1%} to {max(shares):.1%} of the time; exchanges: {paths or 'none'}")
    if any(node.home for node in report.nodes):
        links = Counter(path for node in report.nodes for path in node.links.values())
        # Each has two ends, which at that moment may not have said the same of it.
        ways = ", ".join(f"{(number + 1) // 2} {path}" for path, number in sorted(links.items()))
        say(f"links between homes: {ways or 'none'}")
        console.print(link_table(report.nodes).rich())
    if report.faults:
        _print_faults(report, console)
    for stage in report.stages:
        busy = "not known" if stage.utilisation is None else f"{stage.utilisation:.1%}"
        say(
            f"stage {stage.stage}: {stage.providers} nodes, {busy} busy of late; microbatches: {stage.kept} kept, "
            f"{stage.dropped} dropped, {stage.rerouted} sent another way, {stage.taken_out} taken out again"
        )
    for reason in report.reasons:
        say(f"  - {reason}", style="red", markup=False)
    say("PASS" if report.verdict == "pass" else "FAIL", style="bold green" if report.verdict == "pass" else "bold red")
    say(f"{folder / 'report.json'}, {folder / 'loss.png'}", markup=False)


def _print_faults(report: PlayReport, console: Console) -> None:
    from .fault_table import fault_lines, throughput_lines

    for line in (*fault_lines(report), *throughput_lines(report)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


@testnet_app.command("compare")
def compare(
    nodes: Annotated[int, typer.Option(min=2, help="Replicas.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each.")] = 2_000,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 3,
    interval: Annotated[int, typer.Option(min=1, help="Inner steps a round.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for compare.json.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(metavar="WORDS", help="Those with this in their names; may be repeated.")
    ] = None,
    write: Write = None,
) -> None:
    """Train with NoLoCo, DiLoCo, synchronously and without averaging, on the same tokens, in one process.

    Example: [cyan]farandole testnet compare --steps 500 --seeds 1 --methods int8 --methods late[/cyan]
    """
    from .compare import run_compare
    from .section import Section

    section = Section(write, "compare") if write else None
    run_compare(nodes, steps, seeds, out / "compare.json" if out else None, interval, methods or (), section)


@testnet_app.command("traffic", hidden=True)
def traffic(write: Write = None) -> None:
    """Print what exchanges send, by the model's size and codec, as Markdown."""
    from .section import Section
    from .traffic import traffic_table

    table = traffic_table()
    if write:
        Section(write, "traffic").write(table)
    typer.echo(table, nl=False)


@testnet_app.command("bench-exchange")
def bench_exchange(
    out: Annotated[Path, typer.Option(help="Folder for exchange.json, exchange.md, a log.")] = Path("out/bench"),
    sizes: Annotated[
        list[int] | None, typer.Option(min=1, metavar="MB", help="Megabytes to move one way; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 5,
    peers: Annotated[bool, typer.Option(help="Measure hivemind and Lattica too, installing them once.")] = True,
    cache: Annotated[Path, typer.Option(help="Folder in which the two are installed.")] = Path(".bench"),
    write: Write = None,
) -> None:
    """Measure how fast contributions move between two processes, beside raw sockets, libp2p, hivemind and Lattica.

    Examples: [cyan]farandole testnet bench-exchange[/cyan];
    [cyan]farandole testnet bench-exchange --sizes 64 --sizes 256 --repeats 3 --no-peers[/cyan]
    """
    from .bench.exchange import SIZES_MB, run_bench
    from .section import Section

    section = Section(write, "exchange") if write else None
    run_bench(out, sizes or SIZES_MB, repeats, cache if peers else None, section=section)


@testnet_app.command("bench-join")
def bench_join(
    size: Annotated[int, typer.Option(min=4, help="Megabytes that a newcomer needs.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 5,
    peers: Annotated[bool, typer.Option(help="Measure hivemind too, installing it once.")] = True,
    link: Annotated[bool, typer.Option(help="Measure on a shaped line too; needs Linux and root.")] = True,
    cache: Annotated[Path, typer.Option(help="Folder in which it is installed.")] = Path(".bench"),
    out: Annotated[Path, typer.Option(help="Folder for join.json, join.md, a log.")] = Path("out/bench"),
    write: Write = None,
) -> None:
    """Measure how fast a newcomer gets its weights from two donors and from one, beside hivemind, and what it costs.

    Examples: [cyan]farandole testnet bench-join[/cyan];
    [cyan]farandole testnet bench-join --size 20 --repeats 1 --no-peers --no-link[/cyan]
    """
    from .bench.join import run_join_bench
    from .section import Section

    section = Section(write, "join") if write else None
    run_join_bench(out, size, repeats, cache if peers else None, section, with_link=link)


@testnet_app.command("bench-stages")
def bench_stages(
    stages: Annotated[int, typer.Option(min=2, help="Into which the model is cut.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps that are timed, a turn.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each variant; the median counts.")] = 3,
    codec_steps: Annotated[int, typer.Option(min=1, help="Inner steps with each activation codec.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with each activation codec.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for stages.json, stages.md, a log.")] = Path("out/bench"),
    write: Write = None,
) -> None:
    """Measure how fast a model in stages learns, beside one process and torch's pipelining, and what codecs cost it.

    Example: [cyan]farandole testnet bench-stages --stages 2 --repeats 1 --codec-steps 100[/cyan]
    """
    from .bench.stages import run_stages_bench
    from .bench.stages_task import Task
    from .section import Section

    section = Section(write, "stages") if write else None
    run_stages_bench(out, Task(num_stages=stages, steps=steps), repeats, codec_steps, seeds, section)


@testnet_app.command("bench-save")
def bench_save(
    turns: Annotated[int, typer.Option(min=1, help="Rounds of each way to save; medians count.")] = 7,
    round_seconds: Annotated[float, typer.Option(min=0.001, help="Length of a round, about.")] = 20.0,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a trainer.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences an inner step.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for saving.json, saving.md, a log, checkpoints.")] = Path(
        "out/bench"
    ),
    write: Write = None,
) -> None:
    """Measure what a checkpoint a round costs training, beside no checkpoint and a blocking torch.save.

    Examples: [cyan]farandole testnet bench-save[/cyan];
    [cyan]farandole testnet bench-save --device cuda --batch-size 64[/cyan]
    """
    from .bench.saving import run_saving_bench
    from .section import Section

    run_saving_bench(
        out,
        turns=turns,
        round_seconds=round_seconds,
        device=device,
        threads=threads,
        batch_size=batch_size,
        section=Section(write, "saving") if write else None,
    )


@testnet_app.command("bench-hostile")
def bench_hostile(
    silent: Annotated[int, typer.Option(min=1, help="Sockets that say nothing.")] = 1_000,
    garbage: Annotated[int, typer.Option(min=1, help="Connections that bring garbage, in each part.")] = 20_000,
    rate: Annotated[float, typer.Option(min=1, help="Of them a second.")] = 100.0,
    cycles: Annotated[int, typer.Option(min=1, help="Connections of one peer that come and go.")] = 5_000,
    out: Annotated[Path, typer.Option(help="Folder for hostile.json, hostile.md, a log.")] = Path("out/bench"),
    write: Write = None,
) -> None:
    """Measure what strangers can do to a node on loopback, and how honest newcomers fare meanwhile.

    Examples: [cyan]farandole testnet bench-hostile[/cyan];
    [cyan]farandole testnet bench-hostile --silent 200 --garbage 1000 --cycles 500[/cyan]
    """
    from .bench.hostile import run_hostile_bench
    from .section import Section

    run_hostile_bench(out, silent, garbage, rate, cycles, Section(write, "hostile") if write else None)


@testnet_app.command("bench-faults")
def bench_faults(
    scenarios: Annotated[
        list[str] | None, typer.Argument(metavar="[SCENARIO]...", help="Which of them.", show_default="all")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for each play's report, faults.json, faults.md.")] = Path(
        "out/faults"
    ),
    write: Write = None,
) -> None:
    """Play the scenarios of faults, some beside the same without, and measure what the faults cost.

    It takes three hours, and goes on where it was stopped: a play whose report is in the folder is not played again.
    Needs Linux, root, nftables, libfaketime. Scenarios: starved, halves, bad-line, flap, chaos, hour.

    Examples: [cyan]sudo .venv/bin/farandole testnet bench-faults[/cyan];
    [cyan]sudo .venv/bin/farandole testnet bench-faults starved halves --out /tmp/faults[/cyan]
    """
    from .bench.faults import run_faults_bench
    from .section import Section

    run_faults_bench(out, scenarios or (), Section(write, "faults") if write else None)


@testnet_app.command("bench-dashboard")
def bench_dashboard(
    members: Annotated[int, typer.Option(min=1, help="Of the run, beside the node whose page it is.")] = 1_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each part: without a page, and with one.")] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder for dashboard.json, dashboard.md, logs.")] = Path("out/bench"),
    write: Write = None,
) -> None:
    """Measure what a page about a large run costs its browser and the daemon; fails where a limit is not kept.

    Needs Chromium and the extra dev. Example: [cyan]farandole testnet bench-dashboard --members 200 --seconds 20[/cyan]
    """
    from .bench.dashboard import run_dashboard_bench
    from .section import Section

    run_dashboard_bench(out, members, seconds, Section(write, "dashboard") if write else None)


@testnet_app.command("bench-nat")
def bench_nat(
    pairs: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND/KIND", help="Two kinds of homes; may be repeated.", show_default="all 55"),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, max=16, help="Pairs that are tried at the same time.")] = 3,
    recovery: Annotated[
        bool,
        typer.Option("--recovery", help="Instead: how soon homes are back when relays, bootstrap peers, routers go."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for nat.json, nat.md, logs.")] = Path("out/bench"),
    write: Write = None,
) -> None:
    """Measure how any home reaches any home: two nodes behind routers of each pair of kinds connect, and exchange.

    In the NAT lab (Linux, root, nftables, miniupnpd). Kinds: open, firewall, full-cone, address-restricted,
    port-restricted, symmetric, carrier, udp-blocked, https-only, upnp.

    Examples: [cyan]sudo .venv/bin/farandole testnet bench-nat[/cyan];
    [cyan]sudo .venv/bin/farandole testnet bench-nat --pairs carrier/full-cone --pairs symmetric/symmetric[/cyan];
    [cyan]sudo .venv/bin/farandole testnet bench-nat --recovery[/cyan]
    """
    from .bench.nat import parse_pair, run_nat_bench
    from .bench.nat_recovery import run_recovery_bench
    from .section import Section

    if recovery:
        run_recovery_bench(out, Section(write, "nat-recovery") if write else None)
        return
    section = Section(write, "nat") if write else None
    run_nat_bench(out, [parse_pair(pair) for pair in pairs or ()], at_once, section)


@testnet_app.command("bench-trainer")
def bench_trainer(
    out: Annotated[Path, typer.Option(help="Folder for trainer.json and the nodes' folders.")] = Path("out/bench"),
    model: Annotated[str, typer.Option(help="A preset.")] = "125M",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences an inner step.")] = 16,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "auto",
    codec: Annotated[str, typer.Option(help="How contributions travel.")] = "int8",
    rounds: Annotated[int, typer.Option(min=3, help="Of each node.")] = 8,
    round_seconds: Annotated[float, typer.Option(min=1, help="Length of a round.")] = 20.0,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Of the device, dense bf16; known for some GPUs.")
    ] = None,
) -> None:
    """Measure what exchanging costs training: two nodes on one device, beside two plain PyTorch loops.

    Examples: [cyan]farandole testnet bench-trainer --device cuda[/cyan];
    [cyan]farandole testnet bench-trainer --device cpu --model 0.5M --rounds 4 --round-seconds 5[/cyan]
    """
    from .bench.training import run_training_bench

    run_training_bench(
        out,
        model=model,
        batch_size=batch_size,
        device=device,
        codec=codec,
        rounds=rounds,
        round_seconds=round_seconds,
        peak_tflops=peak_tflops,
    )
