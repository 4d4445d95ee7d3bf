"""Wall-clock to a loss in homes with slow lines: real nodes, compared with DiLoCo behind a barrier, and with hivemind.

First the nodes are played, then the others on lines and at speeds that are the same, for as long, with the same members
replaced at the same times. DiLoCo has it easier than it would among volunteers: it moves its contributions without
encryption (`farandole.testnet.bench.worker.race`), nobody has to notice that a member is gone, a newcomer gets its
weights for nothing, and a member is replaced only where no all-reduce has to begin again.

hivemind's members (`farandole.testnet.bench.peers.hivemind_member`) average 8-bit weights with all others in the
background, about as often as nodes with one partner, and wait for nobody.

Losses are of the mean of all replicas on held-out text: of the nodes' newest checkpoints, which are up to
`Scenario.checkpoint_seconds` old, of DiLoCo's weights after each round, and of hivemind's as they are.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from safetensors.torch import load_file, save_file

from farandole.protocol.run.manifest import Manifest

from ..natlab.groups import open_leash
from ..natlab.namespace import Location
from ..play.launch import Testnet, play_and_report
from ..play.merge import loss_of, mean_weights, measuring_learner
from ..play.places import open_lodgings
from ..play.process import NodeProcess
from ..play.report import PlayReport
from ..play.scenario import Scenario, load_scenario
from ..report.section import cell
from .process import BenchError, BenchWorker, ask_all, obtain_python, open_worker, peer_command, worker_command
from .report import CACHE, OUT, Bench, Claim, Out, Write, open_bench

SAMPLE_SECONDS: Final = 15.0
# Inner steps between two averages of DiLoCo.
INTERVAL: Final = 12
# What the nodes should be at least, in times as fast to the last loss of DiLoCo.
LEAST_GAIN: Final = 2.0
# By then a newcomer has loaded torch, on cores that others use.
_PREPARE_SECONDS: Final = 15.0
# Between two looks at the clock: hivemind's members train by themselves, and tell nothing.
_LOOK_SECONDS: Final = 0.2
NODES, DILOCO = "pairs, overlapping, int8", "DiLoCo, ring all-reduce, barrier, fp32"
HIVEMIND = "hivemind 1.1.12, all, in the background, 8-bit"


@dataclass(frozen=True)
class Sample:
    """Weights at a time."""

    seconds: float
    """Since training began."""
    weights: Path


Curve = Sequence[tuple[float, float]]
"""Seconds since training began, and the loss then, in order."""


@dataclass(frozen=True)
class Replacement:
    """A member that goes, and the one that comes."""

    seconds: float
    gone: int
    come: int


def run(
    name: Annotated[str, typer.Option("--scenario", help="A scenario with lines and boxed rounds.")] = "race",
    rate: Annotated[float, typer.Option(min=0.001, help="Factor of the scenario's learning rate for DiLoCo.")] = 1.0,
    peers: Annotated[bool, typer.Option(help="Play hivemind too, installing it once.")] = True,
    hivemind_seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds' worth of all members' steps between hivemind's averages.")
    ] = 24.0,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure the wall-clock to a loss on slow home lines, compared with DiLoCo and hivemind (30 minutes; Linux, root).

    Examples: [cyan]farandole testnet bench race[/cyan];
    [cyan]farandole testnet bench race --rate 0.25 --no-peers[/cyan]
    """
    scenario = load_scenario(name)
    if not scenario.home or not scenario.manifest(0.0).rounds.round_seconds or not scenario.seconds_of_step(0):
        raise BenchError(f"{name} is no race: name a scenario with [[home]], boxed rounds and step_seconds")
    manifest = scenario.manifest(0.0)
    choices: dict[str, Any] = {"scenario": name, "rounds": scenario.rounds, "interval": INTERVAL, "rate": rate}
    with open_bench("race", out, write, title="Time to a loss in homes", **choices) as bench:
        python = obtain_python("hivemind", CACHE, bench.say) if peers else None
        folder = (out / "race").absolute()
        samples = folder.with_name("race-samples")
        samples.mkdir(parents=True, exist_ok=True)
        taken: list[Sample] = []
        play = play_and_report(Testnet(scenario, folder, bench.say, watch=sampling(samples, taken)))
        if not taken:
            raise BenchError(f"the nodes saved no checkpoint: see {folder / 'nodes'}")
        seconds = taken[-1].seconds
        # A node's steps are counted by tokens: a newcomer's count of steps goes on from its donor's.
        num_steps = sum(node.tokens for node in play.nodes) / (manifest.inner.batch_size * manifest.model.context)
        num_early = scenario.nodes - len(scenario.named_by("join"))
        played = {NODES: (taken, seconds * num_early / num_steps)}
        bench.say("DiLoCo")
        played[DILOCO] = play_diloco(bench, scenario, rate, seconds, samples)
        if python is not None:
            played[HIVEMIND] = play_hivemind(bench, scenario, python, seconds, hivemind_seconds, samples)
        bench.say("losses")
        curves = {way: measured(manifest, each) for way, (each, _) in played.items()}
        publish(bench, play, curves, {way: pace for way, (_, pace) in played.items()})


def sampling(folder: Path, taken: list[Sample]) -> Callable[[Sequence[NodeProcess], float], None]:
    """Return a watch over a play that saves the mean of the newest checkpoints now and then, and notes it in ``taken``.

    The time counts from the first inner step of the first node on.
    """
    began_at: float | None = None

    def watch(nodes: Sequence[NodeProcess], seconds: float) -> None:
        nonlocal began_at
        live = [node for node in nodes if node.is_running]
        if began_at is None and any(node.report.tokens for node in live):
            began_at = seconds
        if began_at is None or seconds - began_at < SAMPLE_SECONDS * (len(taken) + 1):
            return
        if paths := [path for node in live if (path := node.checkpoint) is not None]:
            taken.append(Sample(seconds - began_at, folder / f"{len(taken):03d}.safetensors"))
            save_file(mean_weights(paths)[0], taken[-1].weights)

    return watch


# The others


def replacements(scenario: Scenario) -> list[Replacement]:
    """Return who is replaced by whom, in order. Raises `BenchError` for other faults than a kill and a join."""
    seconds = scenario.manifest(0.0).rounds.round_seconds
    by_round: dict[int, dict[str, int]] = defaultdict(dict)
    for fault in scenario.fault:
        if fault.kind not in ("kill", "join") or fault.at_round is None or len(fault.nodes) != 1:
            raise BenchError("only members that are replaced at a round can be played with DiLoCo")
        by_round[fault.at_round][fault.kind] = fault.nodes[0]
    return [Replacement(at * seconds, each["kill"], each["join"]) for at, each in sorted(by_round.items())]


Turn = Callable[[dict[int, BenchWorker], Sequence[Replacement], float], None]
"""Called again and again while members play: with the present ones by index, those that were just replaced, and when
the play began."""


def play_members(
    scenario: Scenario,
    command: Sequence[str],
    log: Path,
    request: Callable[[int, Location, Mapping[str, Any]], Mapping[str, Any]],
    turn: Turn,
    seconds: float,
) -> None:
    """Play another method's members for this time, each in a home of its own; some are replaced.

    ``request`` returns what a member begins with: it gets the first member's answer, which is empty for the first.
    """
    due, coming = replacements(scenario), dict[int, BenchWorker]()
    with ExitStack() as stack:
        leash = stack.enter_context(open_leash())
        lodgings = stack.enter_context(open_lodgings(scenario.home, scenario.nodes, leash))
        places = [home.host for _, home in lodgings if home is not None]

        def begin(index: int, answer: Mapping[str, Any]) -> BenchWorker:
            worker = stack.enter_context(open_worker(f"member {index}", [*places[index].enter, *command], log))
            stack.callback(worker.kill)  # its children would outlive it
            own = request(index, places[index], answer)
            worker.put("begin", author=index, step_seconds=scenario.seconds_of_step(index), **own)
            return worker

        first, *others = (index for index in range(scenario.nodes) if index not in scenario.named_by("join"))
        members = {first: begin(first, {})}
        answer = members[first].get()
        members |= {index: begin(index, answer) for index in others}
        for index in others:
            members[index].get()
        began_at = time.monotonic()
        while (now := time.monotonic() - began_at) < seconds:
            for change in due:
                if change.seconds - _PREPARE_SECONDS <= now and change.come not in coming:
                    coming[change.come] = begin(change.come, answer)
            changes = [change for change in due if change.seconds <= now]
            for change in changes:
                due.remove(change)
                members.pop(change.gone).kill()
                members[change.come] = coming[change.come]
                members[change.come].get()
            turn(members, changes, began_at)


def play_diloco(
    bench: Bench, scenario: Scenario, rate: float, seconds: float, folder: Path
) -> tuple[list[Sample], float]:
    """Play DiLoCo for this time; return its weights after each round, and the seconds of a member's inner step.

    ``rate``: factor of the learning rate.
    """
    nodes = scenario.manifest(0.0)
    inner = msgspec.structs.replace(nodes.inner, learning_rate=rate * nodes.inner.learning_rate)
    settings = {"manifest": msgspec.to_builtins(msgspec.structs.replace(nodes, inner=inner))}
    samples: list[Sample] = []
    group = str(folder / f"group-{time.monotonic_ns()}")

    def take_round(members: dict[int, BenchWorker], changes: Sequence[Replacement], began_at: float) -> None:
        nonlocal group
        for change in changes:
            members[change.come].ask("load", path=str(samples[-1].weights))
            group += f"-{change.come}"
        live = list(members.values())
        ask_all(live, "learn", steps=INTERVAL)
        ranks = [{"rank": rank} for rank in range(len(live))]
        ask_all(live, "average", ranks, world=len(ranks), group=group, device="eth0")
        file = folder / f"diloco-{len(samples):03d}.safetensors"
        samples.append(Sample(time.monotonic() - began_at, file))
        live[0].ask("save", path=str(file))
        bench.say(f"DiLoCo: {len(samples)} rounds, {samples[-1].seconds:.0f} of {seconds:.0f} s")

    play_members(scenario, worker_command("race:DiLoCoMember"), bench.log, lambda *_: settings, take_round, seconds)
    return samples, samples[-1].seconds / (len(samples) * INTERVAL)


def play_hivemind(
    bench: Bench, scenario: Scenario, python: Path, seconds: float, interval: float, folder: Path
) -> tuple[list[Sample], float]:
    """Play hivemind for this time; return the mean of its weights now and then, and the seconds of a member's step.

    ``interval``: seconds between two averages, if no member waits.
    """
    manifest = scenario.manifest(0.0)
    early = [index for index in range(scenario.nodes) if index not in scenario.named_by("join")]
    speed = sum(1 / scenario.seconds_of_step(index) for index in early)
    settings = {
        "folders": [os.path.abspath(each) for each in sys.path],
        "manifest": msgspec.to_builtins(manifest),
        "target": round(interval * speed * manifest.inner.batch_size),
    }
    steps_of = dict.fromkeys(range(scenario.nodes), 0)
    donors = {change.come: change.gone for change in replacements(scenario)}
    samples: list[Sample] = []
    num_steps = 0

    def request(index: int, place: Location, first: Mapping[str, Any]) -> dict[str, Any]:
        peers, steps = first.get("addresses", []), steps_of[donors.get(index, index)]
        return {**settings, "ip": place.ip, "peers": peers, "steps": steps}

    def look(members: dict[int, BenchWorker], changes: Sequence[Replacement], began_at: float) -> None:
        nonlocal num_steps
        for change in changes:
            steps_of[change.come] = steps_of[change.gone]
        if time.monotonic() - began_at < SAMPLE_SECONDS * (len(samples) + 1):
            time.sleep(_LOOK_SECONDS)
            return
        files = [folder / f"hivemind-{index}.safetensors" for index in members]
        saved = ask_all([*members.values()], "save", [{"path": str(file)} for file in files])
        for index, answer in zip(members, saved, strict=True):
            num_steps += answer["steps"] - steps_of[index]
            steps_of[index] = answer["steps"]
        samples.append(Sample(time.monotonic() - began_at, folder / f"hivemind-{len(samples):03d}.safetensors"))
        save_file(mean_weights(files)[0], samples[-1].weights)
        epochs = max(answer["epochs"] for answer in saved)
        bench.say(f"hivemind: {epochs} averages, {samples[-1].seconds:.0f} of {seconds:.0f} s")

    play_members(scenario, peer_command(python, "hivemind_member"), bench.log, request, look, seconds)
    return samples, samples[-1].seconds * len(early) / num_steps


# Losses


def measured(manifest: Manifest, samples: Sequence[Sample]) -> Curve:
    """Return the losses of samples on held-out text, in nats a token."""
    learner = measuring_learner(manifest, bytes(32))
    return [(sample.seconds, loss_of(learner, load_file(sample.weights))) for sample in samples]


def seconds_to(curve: Curve, goal: float) -> float | None:
    """Return when a curve first reaches a loss, between two samples by interpolation; None if it never does."""
    before: tuple[float, float] | None = None
    for seconds, loss in curve:
        if loss <= goal:
            if before is None:
                return seconds
            share = (before[1] - goal) / (before[1] - loss)
            return before[0] + share * (seconds - before[0])
        before = seconds, loss
    return None


def publish(bench: Bench, play: PlayReport, curves: Mapping[str, Curve], paces: Mapping[str, float]) -> None:
    """Publish the result; ``paces``: seconds of the run for an inner step of an average member."""
    ends = {way: curve[-1] for way, curve in curves.items()}
    reached = {way: seconds_to(curves[NODES], loss) for way, (_, loss) in ends.items()}
    claims = [
        Claim(
            f"seconds to the loss that {way} ends with, {loss:.3f}",
            cell(reached[way], "{:.0f}", "never"),
            f"{seconds:.0f}",
        )
        for way, (seconds, loss) in ends.items()
        if way != NODES
    ]
    words = "seconds of the run for an inner step of an average member; theirs: DiLoCo"
    claims.append(Claim(words, f"{paces[NODES]:.2f}", f"{paces[DILOCO]:.2f}"))
    misses, ours = [*play.reasons], reached[DILOCO]
    if ours is None or ends[DILOCO][0] < LEAST_GAIN * ours:
        misses.append(f"the nodes reach DiLoCo's last loss less than {LEAST_GAIN:g} times as fast")
    bench.publish(claims, {"curves": curves, "play": msgspec.to_builtins(play)}, misses=misses)
