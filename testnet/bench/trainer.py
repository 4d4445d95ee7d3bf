"""The cost of an exchange to training: nodes that train and exchange, compared with plain loops on the same device.

The number of plain loops equals the number of nodes, and they run at once, so that both share the device alike; the
ratio is between the sums. A node's rate is of its second round and later ones, until the first node is done: it
includes everything that keeps its trainer from inner steps, such as pauses and exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import msgspec
import trio
import typer

from farandole.node.base.settings import NodeSettings
from farandole.node.status.round_log import RoundRecord, read_rounds
from farandole.protocol.run.models import num_parameters, preset
from farandole.training.base.device import choose_device

from ..play.launch import Testnet
from ..play.report import Merged
from ..play.scenario import Scenario
from .process import ANSWER_TIMEOUT, BenchError, get_all, open_workers
from .report import OUT, Bench, Claim, Out, Write, open_bench

NUM_NODES: Final = 2
# Turns of inner steps alone, of each kind.
ENGINE_TURNS: Final = 10
ENGINE_SECONDS: Final = 3.0
# Ends of a round that are timed, and how long they take: a billion parameters on a slow disk.
END_TURNS: Final = 3
END_TIMEOUT: Final = 60 * ANSWER_TIMEOUT


def run(
    out: Out = OUT,
    model: Annotated[str, typer.Option(help="A preset.")] = "125M",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences an inner step.")] = 16,
    device: Annotated[str, typer.Option(help="As for farandole join.")] = "auto",
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each node.")] = 8,
    round_seconds: Annotated[float, typer.Option(min=1, help="Length of a round.")] = 20.0,
    write: Write = False,
) -> None:
    """Measure what exchanging costs training: two nodes on one device, and two plain PyTorch loops.

    Examples: [cyan]farandole testnet bench trainer --device cuda[/cyan];
    [cyan]farandole testnet bench trainer --device cpu --model 0.5M --rounds 4 --round-seconds 5[/cyan]
    """
    where = choose_device(device).torch_device.type
    name, title = ("trainer", "Training on a CPU") if where == "cpu" else (f"trainer-{where}", "Training on a GPU")
    with open_bench(name, out, write, title=title) as bench:
        manifest = manifest_of_bench(model, batch_size, round_seconds)
        figures = measure(bench, manifest, device, rounds, round_seconds)
        bench.setting["device"] = figures["device"]
        bench.publish(claims_of(figures), figures)


def measure(bench: Bench, run: dict[str, Any], device: str, rounds: int, round_seconds: float) -> dict[str, Any]:
    """Measure plain loops, then nodes that exchange; the nodes' folders are in ``bench.out / "trainer"``.

    Tokens a second are sums over the nodes, and over the plain loops; each exchange is counted by both its partners.

    Raises `BenchError` if the nodes did not exchange, or there was too little to measure.
    """
    bench.say(f"inner steps of a node and of a plain loop, in {2 * ENGINE_TURNS} turns of {ENGINE_SECONDS:g} s")
    with open_workers("training", ["inner steps"], bench.log) as (worker,):
        worker.put("compare", run=run, device=device, turns=ENGINE_TURNS, seconds=ENGINE_SECONDS)
        engine = float(worker.get(ANSWER_TIMEOUT + 4 * ENGINE_TURNS * ENGINE_SECONDS)["ratio"])
    bench.say("the end of a round")
    with (
        TemporaryDirectory(dir=bench.out) as place,
        open_workers("training", ["a round's end"], bench.log) as (worker,),
    ):
        worker.put("end_rounds", run=run, device=device, path=f"{place}/checkpoint", turns=END_TURNS)
        round_end = worker.get(END_TIMEOUT)["seconds"]
    bench.say(f"{NUM_NODES} plain loops for {round_seconds * 2:g} s")
    request = {"run": run, "device": device, "warmup_seconds": round_seconds, "seconds": 2 * round_seconds}
    with open_workers("training", [f"plain loop {author}" for author in range(NUM_NODES)], bench.log) as workers:
        for author, worker in enumerate(workers):
            worker.put("learn_plainly", author=author, **request)
        plain = get_all(workers, ANSWER_TIMEOUT + 3 * round_seconds)
    scenario = msgspec.convert(
        {"run": run, "nodes": NUM_NODES, "rounds": rounds, "device": device, "timeout": 3_600}, Scenario
    )
    folder = bench.out / "trainer"
    # The losses are not needed here.
    testnet = Testnet(scenario, folder.absolute(), bench.say, measure=lambda *_: Merged(0.0, 0.0, 0.0))
    report = trio.run(testnet.play)
    exchanges = sum(node.exchanges_ok for node in report.nodes)
    if not exchanges:
        raise BenchError(f"the nodes never exchanged: see {folder / 'nodes'}")
    homes = [folder / "nodes" / f"{node.index:02d}" for node in report.nodes]
    played = [[*read_rounds(NodeSettings(home=home).rounds)] for home in homes]
    ended_at = min(rounds[-1].at for rounds in played)
    return {
        "device": str(plain[0]["device"]),
        "num_parameters": num_parameters(preset(run["model"])),
        "exchanges": exchanges,
        "plain_tokens_per_second": sum(each["tokens_per_second"] for each in plain),
        "node_tokens_per_second": sum(rate_of(each, ended_at) for each in played),
        "engine_over_plain": engine,
        "round_end": round_end,
    }


def manifest_of_bench(model: str, batch_size: int, round_seconds: float) -> dict[str, Any]:
    """Return the settings of the run that both train, as in a run file."""
    return {
        "name": "bench-trainer",
        "model": model,
        "inner": {"batch_size": batch_size},
        "outer": {"codec": "int8"},
        "rounds": {"round_seconds": round_seconds, "exchange_seconds": round_seconds, "overlap": True},
    }


def rate_of(rounds: Sequence[RoundRecord], ended_at: float) -> float:
    """Return tokens per second from the end of the first round to that of the last before a time."""
    first, *others = (each for each in rounds if each.at <= ended_at)
    if not others:
        raise BenchError("a node ended one round alone while the other trained: play more, or longer, rounds")
    return sum(each.tokens for each in others) / (others[-1].at - first.at)


def claims_of(figures: Mapping[str, Any]) -> list[Claim]:
    """Return what exchanging costs inner steps, and what the end of a round takes."""
    nodes = f"{NUM_NODES} nodes with {figures['exchanges'] // 2} exchanges, tokens/s"
    sums = (f"{figures[each]:,.0f}" for each in ("node_tokens_per_second", "plain_tokens_per_second"))
    steps = f"inner steps of a node, over those of a plain PyTorch loop; {figures['num_parameters']:,} parameters"
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in figures["round_end"].items())
    return [
        Claim(steps, f"{figures['engine_over_plain']:.2f}"),
        Claim(f"{nodes}; theirs: as many plain loops at once", *sums),
        Claim("seconds of the parts of a round's end", parts),
    ]
