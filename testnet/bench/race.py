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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.models import num_parameters
from farandole.protocol.run.outer_rules import SLOW
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.engine.learner import build_learner

from ..natlab.groups import open_leash
from ..play.launch import PlayView, Testnet, play_and_report
from ..play.live import open_view
from ..play.merge import VALIDATION_BATCHES
from ..play.places import LINK_DEVICE, open_links
from ..play.process import NodeProcess
from ..play.report import PlayReport
from ..play.scenario import Scenario, load_scenario
from ..report.section import Grid, cell
from .process import BenchError, BenchWorker, ask_all, obtain_python, open_worker, peer_command, worker_command
from .report import CACHE, OUT, Bench, BenchReport, Cache, Claim, Out, Write, open_bench

SAMPLE_SECONDS: Final = 15.0
# What the nodes should be at least, in times as fast to the last loss of DiLoCo.
LEAST_GAIN: Final = 2.0
_SLOW: Final = f"{SLOW}/"
# By then a newcomer has loaded torch, on cores that others use.
_PREPARE_SECONDS: Final = 15.0
# Between two looks at the clock: hivemind's members train by themselves, and tell nothing.
_LOOK_SECONDS: Final = 0.2
NODES, DILOCO = "pairs, overlapping, int8", "DiLoCo, ring all-reduce, barrier, fp32"
HIVEMIND = "hivemind 1.1.12, all, in the background, 8-bit"


@dataclass(frozen=True)
class Sample:
    """Weights at a time, and later their loss."""

    seconds: float
    """Since training began."""
    weights: Path
    loss: float = 0.0


@dataclass(frozen=True)
class Replacement:
    """A member that goes, and the one that comes."""

    seconds: float
    gone: int
    come: int


@dataclass(frozen=True)
class DiLoCoSettings:
    """The settings of DiLoCo's members that differ from the nodes'."""

    interval: int
    """Inner steps between two averages."""
    rate: float
    """Factor of the learning rate."""

    def manifest(self, nodes: Manifest) -> Manifest:
        """Return the settings of its members, from those of the nodes."""
        rate = self.rate * nodes.inner.learning_rate
        return msgspec.structs.replace(nodes, inner=msgspec.structs.replace(nodes.inner, learning_rate=rate))


class _Sampler:
    """A view that saves the mean of the newest checkpoints now and then, and forwards to another view."""

    def __init__(self, view: PlayView, folder: Path) -> None:
        self._view = view
        self._folder = folder
        self._began_at: float | None = None
        self.samples: list[Sample] = []

    def say(self, text: str) -> None:
        """Forward to the view."""
        self._view.say(text)

    def show(self, nodes: Sequence[NodeProcess], seconds: float, scenario: Scenario) -> None:
        """Sample, from the first inner step of the first node on."""
        self._view.show(nodes, seconds, scenario)
        live = [node for node in nodes if node.is_running]
        if self._began_at is None and any(node.record.tokens for node in live):
            self._began_at = seconds
        if self._began_at is None or seconds - self._began_at < SAMPLE_SECONDS * (len(self.samples) + 1):
            return
        paths = [path for node in live if (path := node.checkpoint) is not None]
        if not paths:
            return
        file = self._folder / f"{len(self.samples):03d}.safetensors"
        save_file(mean_weights(paths), file)
        self.samples.append(Sample(seconds - self._began_at, file))


def mean_weights(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the slow weights of some replicas, by parameter."""
    sums: dict[str, Tensor] = {}
    for path in checkpoints:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                if name.startswith(_SLOW):
                    tensor = file.get_tensor(name)
                    sums[name] = sums[name].add_(tensor) if name in sums else tensor
    return {name.removeprefix(_SLOW): total / len(checkpoints) for name, total in sums.items()}


def run(
    name: Annotated[str, typer.Option("--scenario", help="A scenario with lines and boxed rounds.")] = "race",
    interval: Annotated[int, typer.Option(min=1, help="Inner steps between DiLoCo's averages.")] = 12,
    rate: Annotated[float, typer.Option(min=0.001, help="Factor of the scenario's learning rate for DiLoCo.")] = 1.0,
    peers: Annotated[bool, typer.Option(help="Play hivemind too, installing it once.")] = True,
    hivemind_seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds' worth of all members' steps between hivemind's averages.")
    ] = 24.0,
    cache: Cache = CACHE,
    out: Out = OUT,
    write: Write = False,
) -> None:
    """Measure the wall-clock to a loss on slow home lines, beside DiLoCo and hivemind (30 minutes; Linux, root).

    Examples: [cyan]farandole testnet bench race[/cyan];
    [cyan]farandole testnet bench race --interval 24 --rate 0.25 --no-peers[/cyan]
    """
    scenario = load_scenario(name)
    if scenario.link is None or not scenario.manifest(0.0).rounds.round_seconds or not scenario.seconds_of_step(0):
        raise BenchError(f"{name} is no race: name a scenario with [link], boxed rounds and step_seconds")
    settings = DiLoCoSettings(interval, rate)
    with open_bench("race", out, write, scenario=name, rounds=scenario.rounds, interval=interval, rate=rate) as bench:
        python = obtain_python("hivemind", cache, bench.say) if peers else None
        folder = (out / "race").absolute()
        with open_view(bench.console) as view:
            samples = folder.with_name("race-samples")
            samples.mkdir(parents=True, exist_ok=True)
            sampler = _Sampler(view, samples)
            play = play_and_report(Testnet(scenario, folder, sampler))
        if not sampler.samples:
            raise BenchError(f"the nodes saved no checkpoint: see {folder / 'nodes'}")
        bench.say("DiLoCo")
        manifest, seconds = scenario.manifest(0.0), sampler.samples[-1].seconds
        diloco, num_steps = play_diloco(bench, scenario, settings, seconds, samples)
        found = {NODES: sampler.samples, DILOCO: diloco}
        paces = {NODES: node_pace(scenario, manifest, play, seconds), DILOCO: diloco[-1].seconds / num_steps}
        if python is not None:
            played = play_hivemind(bench, scenario, python, seconds, hivemind_seconds, samples)
            found[HIVEMIND], paces[HIVEMIND] = played
        bench.say("losses")
        curves = {way: measured(manifest, each) for way, each in found.items()}
        bench.publish(report(bench.setting, scenario, settings, play, curves, paces, hivemind_seconds))


# DiLoCo


def replacements(scenario: Scenario) -> list[Replacement]:
    """Return who is replaced by whom, in order. Raises `BenchError` for other faults than a kill and a join."""
    seconds = scenario.manifest(0.0).rounds.round_seconds
    by_round: dict[int, dict[str, int]] = defaultdict(dict)
    for fault in scenario.fault:
        if fault.kind not in ("kill", "join") or fault.at_round is None or len(fault.nodes) != 1:
            raise BenchError("only members that are replaced at a round can be played with DiLoCo")
        by_round[fault.at_round][fault.kind] = fault.nodes[0]
    return [Replacement(at * seconds, each["kill"], each["join"]) for at, each in sorted(by_round.items())]


def play_diloco(
    bench: Bench, scenario: Scenario, diloco: DiLoCoSettings, seconds: float, folder: Path
) -> tuple[list[Sample], int]:
    """Play DiLoCo for this time; return its weights after each round, and a member's inner steps."""
    assert scenario.link is not None
    settings, due = msgspec.to_builtins(diloco.manifest(scenario.manifest(0.0))), replacements(scenario)
    early = [index for index in range(scenario.nodes) if index not in scenario.late_joiners]
    with ExitStack() as stack:
        places = stack.enter_context(open_links(scenario.link, scenario.nodes, stack.enter_context(open_leash())))

        def begin(index: int) -> BenchWorker:
            command = [*places[index].enter, *worker_command("DiLoCo member")]
            worker = stack.enter_context(open_worker(f"member {index}", command, bench.log))
            worker.put("begin", manifest=settings, author=index, step_seconds=scenario.seconds_of_step(index))
            return worker

        members = {index: begin(index) for index in early}
        for worker in members.values():
            worker.get()
        coming: dict[int, BenchWorker] = {}
        samples: list[Sample] = []
        generation, began_at = 0, time.monotonic()
        while (now := time.monotonic() - began_at) < seconds:
            for change in due:
                if change.seconds - _PREPARE_SECONDS <= now and change.come not in coming:
                    coming[change.come] = begin(change.come)
            ask_all(list(members.values()), "learn", steps=diloco.interval)
            for change in [change for change in due if change.seconds <= now]:
                due.remove(change)
                members.pop(change.gone).kill()
                members[change.come] = worker = coming.pop(change.come) if change.come in coming else begin(change.come)
                worker.get()
                worker.ask("load", path=str(samples[-1].weights))
                generation += 1
            group = str(folder / f"group-{generation}-{began_at}")
            ranks = [{"rank": rank} for rank in range(len(members))]
            ask_all(list(members.values()), "average", ranks, world=len(members), group=group, device=LINK_DEVICE)
            file = folder / f"diloco-{len(samples):03d}.safetensors"
            samples.append(Sample(time.monotonic() - began_at, file))
            next(iter(members.values())).ask("save", path=str(file))
            bench.say(f"DiLoCo: {len(samples)} rounds, {samples[-1].seconds:.0f} of {seconds:.0f} s")
    return samples, len(samples) * diloco.interval


# hivemind


def play_hivemind(
    bench: Bench, scenario: Scenario, python: Path, seconds: float, interval: float, folder: Path
) -> tuple[list[Sample], float]:
    """Play hivemind for this time; return the mean of its weights now and then, and the seconds of a member's step.

    ``interval``: seconds between two averages, if no member waits.
    """
    assert scenario.link is not None
    manifest, due = scenario.manifest(0.0), replacements(scenario)
    early = [index for index in range(scenario.nodes) if index not in scenario.late_joiners]
    speed = sum(1 / scenario.seconds_of_step(index) for index in early)
    request = {
        "folders": [os.path.abspath(each) for each in sys.path],
        "manifest": msgspec.to_builtins(manifest),
        "codec": "8-bit",
        "target": round(interval * speed * manifest.inner.batch_size),
    }
    command = peer_command(python, "hivemind_member")
    with ExitStack() as stack:
        places = stack.enter_context(open_links(scenario.link, scenario.nodes, stack.enter_context(open_leash())))
        addresses: list[str] = []

        def begin(index: int, steps: int) -> BenchWorker:
            place, step_seconds = places[index], scenario.seconds_of_step(index)
            worker = stack.enter_context(open_worker(f"hivemind {index}", [*place.enter, *command], bench.log))
            stack.callback(worker.kill)  # its children would outlive it
            worker.put(
                "begin", **request, author=index, step_seconds=step_seconds, ip=place.ip, peers=addresses, steps=steps
            )
            return worker

        members = {early[0]: begin(early[0], 0)}
        addresses += members[early[0]].get()["addresses"]
        members |= {index: begin(index, 0) for index in early[1:]}
        for index in early[1:]:
            members[index].get()
        coming: dict[int, BenchWorker] = {}
        samples: list[Sample] = []
        num_steps, steps_of = 0, dict.fromkeys(members, 0)
        began_at = time.monotonic()
        while (now := time.monotonic() - began_at) < seconds:
            for change in due:
                if change.seconds - _PREPARE_SECONDS <= now and change.come not in coming:
                    coming[change.come] = begin(change.come, steps_of[change.gone])
            for change in [change for change in due if change.seconds <= now]:
                due.remove(change)
                members.pop(change.gone).kill()
                members[change.come] = coming[change.come]
                members[change.come].get()
                steps_of[change.come] = steps_of[change.gone]
            if now < SAMPLE_SECONDS * (len(samples) + 1):
                time.sleep(_LOOK_SECONDS)
                continue
            files = [folder / f"hivemind-{index}.safetensors" for index in members]
            saved = ask_all(list(members.values()), "save", [{"path": str(file)} for file in files])
            for index, answer in zip(members, saved, strict=True):
                num_steps += answer["steps"] - steps_of[index]
                steps_of[index] = answer["steps"]
            samples.append(Sample(time.monotonic() - began_at, folder / f"hivemind-{len(samples):03d}.safetensors"))
            save_file(mean_weights(files), samples[-1].weights)
            epochs = max(answer["epochs"] for answer in saved)
            bench.say(f"hivemind: {epochs} averages, {samples[-1].seconds:.0f} of {seconds:.0f} s")
    return samples, samples[-1].seconds * len(early) / num_steps


# Losses and paces


def measured(manifest: Manifest, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with their losses on held-out text, in nats a token."""
    learner = build_learner(manifest, run_id=bytes(32), author=bytes(32), settings=TrainerSettings(device="cpu"))
    weights = dict(learner.replica.module.named_parameters())
    found = []
    for sample in samples:
        saved = load_file(sample.weights)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(saved[name])
        found.append(replace(sample, loss=learner.evaluate(VALIDATION_BATCHES)))
    return found


def seconds_to(curve: Sequence[Sample], loss: float) -> float | None:
    """Return when a curve first reaches a loss, between two samples by interpolation; None if it never does."""
    before: Sample | None = None
    for sample in curve:
        if sample.loss <= loss:
            if before is None:
                return sample.seconds
            share = (before.loss - loss) / (before.loss - sample.loss)
            return before.seconds + share * (sample.seconds - before.seconds)
        before = sample
    return None


def node_pace(scenario: Scenario, manifest: Manifest, play: PlayReport, seconds: float) -> float:
    """Return the seconds of the run for an inner step of an average node.

    Steps are counted by tokens: a newcomer's count of steps goes on from its donor's.
    """
    num_early = scenario.nodes - len(scenario.late_joiners)
    num_steps = sum(node.tokens for node in play.nodes) / (manifest.inner.batch_size * manifest.model.context)
    return seconds * num_early / num_steps


def report(
    setting: Mapping[str, Any],
    scenario: Scenario,
    settings: DiLoCoSettings,
    play: PlayReport,
    curves: Mapping[str, Sequence[Sample]],
    paces: Mapping[str, float],
    hivemind_seconds: float,
) -> BenchReport:
    """Return the tables and their data."""
    nodes, diloco, manifest = curves[NODES], curves[DILOCO], scenario.manifest(0.0)
    rows = [
        [
            way,
            f"{curve[-1].seconds:.0f}",
            f"{paces[way]:.2f}",
            f"{curve[-1].loss:.3f}",
        ]
        for way, curve in curves.items()
    ]
    pace = Grid("The same lines, speeds and replacements", list(_PACE_HEADER), rows)
    reached = times_to_losses(nodes, diloco)
    grids = [pace, _times_grid("DiLoCo", reached)]
    if HIVEMIND in curves:
        grids.append(_times_grid("hivemind", times_to_losses(nodes, curves[HIVEMIND])))
    early = [scenario.seconds_of_step(index) for index in range(scenario.nodes) if index not in scenario.late_joiners]
    words = [
        f"{len(early)} homes, {num_parameters(manifest.model):,} parameters; an inner step takes {min(early):g} to "
        f"{max(early):g} s. Pairs average {manifest.outer.codec} every {manifest.rounds.round_seconds:g} s, DiLoCo "
        f"fp32 every {settings.interval} inner steps of each member, at {settings.rate:g} times their learning rate. "
        "*A step*: seconds of the run for an inner step of an average member. Losses are of the mean of all replicas, "
        "in nats a token.",
    ]
    if HIVEMIND in curves:
        words.append(
            "hivemind's members have the nodes' learning rate. They average once all together have taken as many "
            f"steps as they can take in {hivemind_seconds:g} s."
        )
    data = {
        "curves": {way: [[sample.seconds, sample.loss] for sample in curve] for way, curve in curves.items()},
        "play": msgspec.to_builtins(play),
    }
    misses = list(play.reasons)
    sample, seconds = reached[-1]
    if seconds is None or sample.seconds < LEAST_GAIN * seconds:
        misses.append(f"the nodes reach DiLoCo's last loss less than {LEAST_GAIN:g} times as fast")
    claims = [
        _claim("DiLoCo with a barrier", reached[-1]),
        *([_claim("hivemind", times_to_losses(nodes, curves[HIVEMIND])[-1])] if HIVEMIND in curves else []),
        Claim("seconds of the run for an inner step; theirs: DiLoCo", f"{paces[NODES]:.2f}", f"{paces[DILOCO]:.2f}"),
    ]
    return BenchReport(setting, grids, data, words, misses, claims)


def _claim(who: str, reached: tuple[Sample, float | None]) -> Claim:
    sample, seconds = reached
    words = f"seconds to the loss that {who} ends with, {sample.loss:.3f}"
    return Claim(words, cell(seconds, "{:.0f}", "never"), f"{sample.seconds:.0f}")


def times_to_losses(nodes: Sequence[Sample], other: Sequence[Sample]) -> list[tuple[Sample, float | None]]:
    """Return four samples of another curve, evenly spaced, and when the nodes reach the loss of each."""
    quarters = [other[(len(other) - 1) * quarter // 4] for quarter in range(1, 5)]
    return [(sample, seconds_to(nodes, sample.loss)) for sample in quarters]


def _times_grid(who: str, reached: Sequence[tuple[Sample, float | None]]) -> Grid:
    return Grid(
        f"Time to a loss of {who}",
        [f"loss that {who} reaches", f"{who}, s", "pairs, s", "times as fast"],
        [
            [
                f"{sample.loss:.3f}",
                f"{sample.seconds:.0f}",
                "never" if seconds is None else f"{seconds:.0f}",
                "" if seconds is None else f"{sample.seconds / seconds:.1f}",
            ]
            for sample, seconds in reached
        ],
    )


_PACE_HEADER: Final = ("averaged by", "seconds", "a step, s", "loss at the end")
