"""Measure the wall-clock to a number of bits per byte: on one machine, and in four homes that train together.

The homes are processes on this machine. Each rests for a part of every step, as if it had a slower machine of its own,
so that all of them fit on a few cores; the table says how many of their steps they kept. All ways have the same time,
and rates that fall towards its end. The target is what one machine reaches at the end.

python speedrun.py                                           # ten minutes each way (the last needs Linux and root)
python speedrun.py --ways one --ways four --seconds 300
python speedrun.py --data nanochat-data --depth 4 --context 512 --step-seconds 8 --seconds 14400
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
from home import Texts, model_for, read_texts
from nanochat_model.bits import bits_per_byte
from nanochat_model.files import TOKENIZER_NAME
from nanochat_model.gpt import GPT
from prepare import prepare
from rich.progress import Progress

import farandole

HOMES: Final = 4
# Of the text that the first step makes: small, as suits a model of d2.
VOCABULARY, MEGABYTES = 1_024, 12.0
START_SECONDS: Final = 300.0
# A loop's node says farewell when it ends.
END_SECONDS: Final = 60.0
# Homes are processes that say nothing of their end: how often to look at them and their logs.
LOOK_SECONDS: Final = 0.2
# As in `farandole testnet bench race`: from one home to another it is twice the delay.
UP_MBIT, DOWN_MBIT, DELAY_MS = 20.0, 100.0, 25.0
# Together as fast as four equal ones; the fastest is four times as fast as the slowest.
UNEQUAL: Final = (1.6, 1.2, 0.8, 0.4)


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    speeds: tuple[float, ...]
    """Of each home, over that of the one machine."""
    has_lines: bool = False

    @property
    def is_alone(self) -> bool:
        """Return whether it is one machine, without farandole."""
        return len(self.speeds) == 1


WAYS: Final = {
    "one": Way("one machine", (1.0,)),
    "four": Way("four homes, each as fast", (1.0,) * HOMES),
    "unequal": Way("four homes, 0.4 to 1.6 times as fast", UNEQUAL),
    "race": Way("the same, 20 Mbit/s up and 50 ms apart", UNEQUAL, has_lines=True),
}


class SpeedrunError(Exception):
    """A way cannot be played; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What is the same for all ways."""

    data: Path
    depth: int = 2
    context: int = 128
    batch: int = 8
    factor: float = 5.0
    seconds: float = 600.0
    step_seconds: float = 1.0
    """Of the one machine."""
    sample_seconds: float = 15.0
    round_seconds: float = 10.0
    rows: int = 128
    """Rows of held-out text to measure with."""


@dataclass(frozen=True)
class Result:
    """What a way has reached."""

    name: str
    steps: int
    """Of all homes together."""
    kept: float
    """Steps over those that their paces allow."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since training began, and bits per byte of the homes' mean then."""

    def seconds_to(self, target: float) -> float | None:
        """Return when the curve first reaches a target, between two samples by interpolation; None if it does not."""
        before: tuple[float, float] | None = None
        for seconds, bits in self.curve:
            if bits <= target:
                share = 1.0 if before is None else (before[1] - target) / (before[1] - bits)
                begin = seconds if before is None else before[0]
                return begin + share * (seconds - begin)
            before = seconds, bits
        return None


# Playing


class HomeProcess:
    """A home as a process, in a group of its own; what it prints goes into a log."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, process_group=0
            )

    def wait_for(self, word: str, seconds: float) -> str:
        """Wait until it prints a line that begins with a word, and return the rest of the line."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                if line.startswith(word):
                    return line.removeprefix(word).strip()
            if self.process.poll() is not None:
                raise SpeedrunError(f"a home has ended early: {self.last_words()}")
            time.sleep(LOOK_SECONDS)
        raise SpeedrunError(f"a home was not {word} after {seconds:.0f} s: {self.last_words()}")

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def end(self) -> None:
        """End it, in order if it can."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its node too, if it is still there
        self.process.wait()

    def last_words(self) -> str:
        """Return the last line of the log, and where it is."""
        lines = self.log.read_text().splitlines() or ["(nothing)"]
        return f"{lines[-1]} ({self.log})"


@contextlib.contextmanager
def open_places(way: Way) -> Iterator[list[tuple[Sequence[str], str]]]:
    """Yield each home's command prefix, and the address on which its node listens."""
    if not way.has_lines:
        yield [((), "127.0.0.1")] * len(way.speeds)
        return
    # Not farandole's interface for users: the lab of `farandole testnet run`.
    from farandole.testnet.natlab.groups import open_leash
    from farandole.testnet.play.places import open_lodgings
    from farandole.testnet.play.scenario import HomeSettings

    line = HomeSettings("open", up_mbit=UP_MBIT, down_mbit=DOWN_MBIT, delay_ms=DELAY_MS)
    with open_leash() as leash, open_lodgings([line], len(way.speeds), leash) as lodgings:
        yield [(place.enter, place.ip) for place, _ in lodgings]


def play(way: Way, settings: Settings, folder: Path, progress: Progress) -> list[Path]:
    """Play a way, and return the folders of its homes' samples."""
    folder.mkdir(parents=True)
    task = progress.add_task(f"{way.name}: starting", total=settings.seconds)
    samples = [folder / f"samples-{index}" for index in range(len(way.speeds))]
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(open_places(way))

        def begin(index: int, *source: str) -> HomeProcess:
            enter, ip = places[index]
            command = [*enter, *command_of(way, settings, index, samples[index], source)]
            log = folder / f"home-{index}.log"
            home = HomeProcess(command, environment_of(folder / f"node-{index}", ip), log)
            stack.callback(home.end)
            return home

        homes = [begin(0, "--alone") if way.is_alone else begin(0, "--create", str(folder / "node-0"))]
        if not way.is_alone:
            invite = homes[0].wait_for("invite ", START_SECONDS)
            own = [[invite, "--home", str(folder / f"node-{index}")] for index in range(len(way.speeds))]
            homes += [begin(index, *own[index]) for index in range(1, len(way.speeds))]
        for home in homes:
            home.wait_for("ready", START_SECONDS)
        began_at = time.monotonic()
        for home in homes:
            home.go()
        while any(home.process.poll() is None for home in homes):
            seconds = min(time.monotonic() - began_at, settings.seconds)
            progress.update(task, completed=seconds, description=f"{way.name}: training")
            if failed := [home for home in homes if home.process.poll()]:
                raise SpeedrunError(f"a home has failed: {failed[0].last_words()}")
            if time.monotonic() - began_at > settings.seconds + START_SECONDS:
                raise SpeedrunError(f"a home does not end: {homes[0].last_words()}")
            time.sleep(LOOK_SECONDS)
    progress.update(task, completed=settings.seconds, description=f"{way.name}: trained")
    return samples


def command_of(way: Way, settings: Settings, index: int, samples: Path, source: Sequence[str]) -> list[str]:
    """Return the command of a home; ``source``: what it trains in."""
    options = {
        "--depth": settings.depth,
        "--context": settings.context,
        "--batch": settings.batch,
        "--factor": settings.factor,
        "--seconds": settings.seconds,
        "--step-seconds": settings.step_seconds / way.speeds[index],
        "--round-seconds": settings.round_seconds,
        "--samples": samples,
        "--sample-seconds": settings.sample_seconds,
        "--part": f"{index}/{len(way.speeds)}",
        "--seed": index,
    }
    words = [str(word) for pair in options.items() for word in pair]
    program = str(Path(__file__).with_name("home.py"))
    return [sys.executable, program, str(settings.data), *source, "--wait", *words]


def environment_of(node: Path, ip: str) -> dict[str, str]:
    """Return the environment of a home: settings of its node, and one thread."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
    own = {"HOME": str(node), "LISTEN": f"/ip4/{ip}/tcp/0", "MDNS": "false", "UPNP": "false", "DASHBOARD": "false"}
    return {**mine, **{f"FARANDOLE_{name}": value for name, value in own.items()}, "OMP_NUM_THREADS": "1"}


# Measuring


def measured(way: Way, settings: Settings, texts: Texts, samples: Sequence[Path], progress: Progress) -> Result:
    """Measure the mean of the homes' weights at each time that all have a sample of."""
    model = model_for(texts, settings.depth, settings.context)
    common = sorted(set.intersection(*({path.name for path in folder.glob("*.pt")} for folder in samples)))
    if not common:
        raise SpeedrunError(f"{way.name}: no home has copied its weights; is --sample-seconds below --seconds?")
    curve, steps, allowed = [], 0, 0.0
    for name in progress.track(common, description=f"{way.name}: measuring"):
        # `home.save_sample` wrote them; weights alone are read, and nothing that a file names is run.
        loaded = [torch.load(folder / name, weights_only=True) for folder in samples]
        load_mean(model, [each["weights"] for each in loaded])
        seconds = max(each["seconds"] for each in loaded)
        bits = bits_per_byte(model, texts.held_out, texts.num_bytes, settings.context, settings.rows)
        curve.append((seconds, bits))
        steps = sum(each["step"] for each in loaded)
        if settings.step_seconds:
            paces = (settings.step_seconds / speed for speed in way.speeds)
            allowed = sum(each["seconds"] / pace for each, pace in zip(loaded, paces, strict=True))
    return Result(way.name, steps, steps / allowed if allowed else 1.0, curve)


def load_mean(model: GPT, weights: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Give a model the mean of weights."""
    model.load_state_dict({name: torch.stack([each[name] for each in weights]).mean(0) for name in weights[0]})


def table(results: Sequence[Result], target: float) -> str:
    """Return the results as a table in Markdown."""
    rows = [
        f"| | seconds to {target:.3f} | bits per byte at the end | steps | of their pace |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        reached = result.seconds_to(target)
        cells = [
            result.name,
            "never" if reached is None else f"{reached:.0f}",
            f"{result.curve[-1][1]:.3f}",
            f"{result.steps:,}",
            f"{result.kept:.0%}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def setting(settings: Settings, texts: Texts) -> str:
    """Return what was measured, where and when."""
    model = model_for(texts, settings.depth, settings.context)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"d{settings.depth}, {parameters / 1e6:.2f} M parameters, {texts.vocabulary:,} tokens, batches of "
        f"{settings.batch} x {settings.context}, {settings.step_seconds:g} s a step of the one machine, "
        f"{settings.seconds:g} s; {datetime.now(UTC).date()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{platform.platform(terse=True)}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def run(settings: Settings, ways: Sequence[str], out: Path, target: float | None) -> None:
    """Play the ways one after the other, and print the table, which is written to ``out`` after each."""
    if not (settings.data / TOKENIZER_NAME).exists():
        prepare(settings.data, vocabulary=VOCABULARY, megabytes=MEGABYTES)
    texts = read_texts(settings.data)
    print(about := setting(settings, texts), flush=True)
    results: list[Result] = []
    for name in ways:
        with Progress() as progress:
            samples = play(WAYS[name], settings, out / name, progress)
            results.append(measured(WAYS[name], settings, texts, samples, progress))
        goal = results[0].curve[-1][1] if target is None else target
        print(table(results, goal), flush=True)
        report = {"setting": about, "target": goal, "results": [asdict(result) for result in results]}
        (out / "speedrun.json").write_text(json.dumps(report, indent=1))


def main() -> int:
    """Read the command line, and measure. Returns the exit code."""
    plain = Settings(Path())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of prepare.py (default: made in OUT, of Python's sources)")
    parser.add_argument("--out", type=Path, default=Path("out/speedrun"), help="a new folder (default: %(default)s)")
    parser.add_argument("--ways", action="append", choices=[*WAYS], help="repeatable (default: all)")
    parser.add_argument("--target", type=float, help="bits per byte (default: what the first way reaches)")
    parser.add_argument("--depth", type=int, default=plain.depth, help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=plain.context, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=plain.batch, help="rows of a step (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=plain.factor, help="of nanochat's rates (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=plain.seconds, help="of each way (default: %(default)s)")
    parser.add_argument(
        "--step-seconds", type=float, default=plain.step_seconds, help="of the one machine (default: %(default)s)"
    )
    parser.add_argument(
        "--sample-seconds", type=float, default=plain.sample_seconds, help="between samples (default: %(default)s)"
    )
    parser.add_argument("--round-seconds", type=float, default=plain.round_seconds, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=plain.rows, help="of held-out text (default: %(default)s)")
    given = vars(parser.parse_args())
    out, ways, target = given.pop("out"), given.pop("ways") or [*WAYS], given.pop("target")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if any((out / name).exists() for name in ways):
            raise SpeedrunError(f"{out} has a speedrun already: name another folder with --out")
        run(Settings(**{**given, "data": given["data"] or out / "data"}), ways, out, target)
    except KeyboardInterrupt:
        print("stopped; what is complete is in the last table", flush=True)
        return 130
    except (SpeedrunError, farandole.FarandoleError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
