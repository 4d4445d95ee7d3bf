"""The kept corpus is replayed, and no decoder is missing from the table."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

import farandole.protocol
from farandole.node.mesh import gate
from farandole.protocol.wire.messagepack import MessageDecoder

from . import corpus
from .decoders import DECODERS
from .mutation import mutate

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(farandole.protocol.__path__, "farandole.protocol.")
] + [gate]
# Names of functions that take a peer's bytes, and of such methods of classes.
READERS = ("decode", "parse", "peek")
METHODS = ("receive_data", "take")


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_kept_is_read_or_refused_and_so_is_what_is_made_of_it(name: str) -> None:
    decoder, rng = DECODERS[name], random.Random(name)
    inputs = [*decoder.seeds, *corpus.read(name)]
    assert "accepted" in {corpus.verdict_on(decoder, data) for data in decoder.seeds}, "no seed is a good one"
    for data in (*inputs, b"", *(mutate(rng.choice(inputs), rng) for _ in range(int(200 * decoder.share)))):
        corpus.verdict_on(decoder, data)


def test_the_corpus_is_small_and_nothing_in_it_is_of_no_decoder() -> None:
    assert {path.stem for path in corpus.CORPUS.iterdir()} == set(DECODERS)
    assert sum(len(data) for name in DECODERS for data in corpus.read(name)) <= corpus.MAX_CORPUS_BYTES


def readers() -> Iterator[tuple[str, object]]:
    """Yield all code that reads a peer's bytes: functions, methods, and decoders of messages."""
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, MessageDecoder):
                yield f"{module.__name__}.{name}", value
            elif inspect.isfunction(value) and value.__module__ == module.__name__ and name.startswith(READERS):
                yield f"{module.__name__}.{name}", value.__code__
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for method in METHODS:
                    if inspect.isfunction(taker := vars(value).get(method)):
                        yield f"{module.__name__}.{name}.{method}", taker.__code__


# Methods of these names that take no peer's bytes.
OTHERS = {
    "farandole.protocol.mesh.dialling.DialBudget.take",
    "farandole.protocol.stages.microbatches.MicrobatchJobs.take",
}


def test_no_decoder_is_missing_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[object] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code: CodeType = frame.f_code
        called.add(code)
        if code is MessageDecoder.__call__.__code__:
            called.add(frame.f_locals["self"])

    sys.setprofile(note)
    try:
        for decoder in DECODERS.values():
            for data in decoder.seeds:
                corpus.verdict_on(decoder, data)
    finally:
        sys.setprofile(None)
    assert {name for name, reader in readers() if reader not in called} == OTHERS
