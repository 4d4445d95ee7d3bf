"""Coverage-guided fuzzing of every decoder, by Atheris (libFuzzer): `make fuzz`, or with names as arguments.

    python -m tests.fuzz.run [--runs 1000000] [--keep] [NAME ...]

Half of the mutations are libFuzzer's, half know MessagePack and frames (`tests.fuzz.mutation`). An input is worth
keeping for mutation if it reaches new code of farandole, or if the decoder's result is new, as msgspec's code cannot
be traced. Each decoder has its own process. A decoder fails if it raises anything but its refusal, takes longer than
`MAX_SECONDS` or more than `MAX_MEGABYTES`; its input stays in out/fuzz. ``--keep`` brings tests/fuzz/corpus up to
date.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["farandole.protocol", "farandole.node.mesh"], enable_loader_override=False):
    from . import corpus
    from .decoders import DECODERS
    from .mutation import mutate

OUT = Path("out/fuzz")
MAX_SECONDS = 10
MAX_MEGABYTES = 2_048
MAX_INPUT_BYTES = 4_096
# Inputs with a new decoder result that are kept; mutation starts from some of them.
MAX_PROMISING = 512


def main() -> None:
    """Fuzz the decoders that the arguments name, or all; exit with status 1 if one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *DECODERS], default=[])
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names or DECODERS:
        if not _run(name, arguments.runs, arguments.seed):
            failed.append(name)
        elif arguments.keep:
            corpus.keep(name, [path.read_bytes() for path in (OUT / name).iterdir()])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the inputs are in {OUT}")


def _run(name: str, runs: int, seed: int) -> bool:
    """Fuzz one decoder in its own process, which libFuzzer ends."""
    runs, began = max(1, int(runs * DECODERS[name].share)), time.monotonic()
    (OUT / name).mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if not pid:
        with (OUT / f"{name}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _fuzz(name, runs, seed)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.monotonic() - began
    print(f"{name:24} {runs:9,} mutations {seconds:7.0f} s  {'FAILED' if status else 'ok'}", flush=True)
    return not status


def _fuzz(name: str, runs: int, seed: int) -> None:
    decoder, folder = DECODERS[name], OUT / name
    promising, said = [*decoder.seeds, *corpus.read(name)], set[str]()
    for number, data in enumerate(promising):
        (folder / f"seed-{number}").write_bytes(data)

    def test_one(data: bytes) -> None:
        verdict = corpus.verdict_on(decoder, data)
        if verdict not in said and len(promising) < MAX_PROMISING:
            said.add(verdict)
            promising.append(data)
            (folder / f"said-{len(promising)}").write_bytes(data)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        data = rng.choice(promising) if rng.random() < 0.3 else data
        return mutate(data, rng)[:max_size] if rng.random() < 0.5 else bytes(atheris.Mutate(data, max_size))

    limits = [f"-timeout={MAX_SECONDS}", f"-rss_limit_mb={MAX_MEGABYTES}", f"-max_len={MAX_INPUT_BYTES}"]
    options = [f"-runs={runs}", f"-seed={seed % 2**31}", f"-artifact_prefix={OUT}/failed-{name}-"]
    atheris.Setup([sys.argv[0], *limits, *options, str(folder)], test_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
