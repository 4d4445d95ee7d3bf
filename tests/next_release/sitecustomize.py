"""Makes a process a stand-in for the next release, or for a cheat: its source is this one's with edits.

Run by Python if PYTHONPATH has this folder; a test sets ``OTHER_SOURCE``:

entries     the next release: its entries have one more field, and a kind of their own
exchange    the same, and its exchanges speak another protocol
half        a trainer that counts every other inner step and does not take it
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

VERSION = "9.8.7"
ENTRIES = "farandole.protocol.state.entries"
# Module -> pieces of its source, each unique there, and what the next release has in their place.
EDITS = {
    ENTRIES: {
        "    NOTES = 18\n": "    NOTES = 18\n    PLAN = 19\n",
        "\n\nclass Beat(Payload": '    mood: Annotated[str, msgspec.Meta(max_length=8)] = ""\n\n\nclass Beat(Payload',
        "\n\n@dataclass(frozen=True, slots=True)\nclass Rule:": (
            "\n\nclass Plan(Payload, frozen=True):\n    words: Annotated[str, msgspec.Meta(max_length=64)]\n"
            "\n\n@dataclass(frozen=True, slots=True)\nclass Rule:"
        ),
        "    Kind.ACCUSATION: Rule(": (
            "    Kind.PLAN: Rule(\n"
            "        Plan, slots=1, quantum=5, ttl=_HOUR, max_bytes=512, checked=0\n    ),\n"
            "    Kind.ACCUSATION: Rule("
        ),
    },
    "farandole.node.base.project": {'version("farandole")': repr(VERSION)},
    "farandole.node.state.membership": {
        "    CheckpointNotice,\n    Kind,\n": "    CheckpointNotice,\n    Kind,\n    Plan,\n",
        "is_bound=self.is_bound,": "is_bound=self.is_bound, mood='fine',",
        "publish(Kind.BEAT, 0, beat_of(self.journal.state))": (
            "publish(Kind.BEAT, 0, beat_of(self.journal.state))\n"
            "        await self.gossip.publish(Kind.PLAN, 0, Plan('on'))"
        ),
    },
}
REPLICA = "farandole.training.engine.replica"
_STEP = "        self.optimizer.step(steps, divisor)\n"
_SOURCES = {
    "entries": EDITS,
    "exchange": EDITS | {"farandole.node.bulk.exchange_service": {"/farandole/exchange/1": "/farandole/exchange/2"}},
    "half": {REPLICA: {_STEP: f"        if steps % 2:\n    {_STEP}"}},
}


def edited(name: str, edits: dict[str, str]) -> str:
    """Return the source of a module with its edits."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    assert isinstance(spec.loader, importlib.abc.InspectLoader), name
    source = spec.loader.get_source(name)
    assert source is not None, name
    for piece, replacement in edits.items():
        assert source.count(piece) == 1, f"{name} has {piece!r} {source.count(piece)} times"
        source = source.replace(piece, replacement)
    return source


def entries_of_next_release() -> ModuleType:
    """Return the next release's module of entries, beside this release's."""
    module = ModuleType(f"{ENTRIES}_of_next_release")
    module.__package__ = ENTRIES.rpartition(".")[0]
    sys.modules[module.__name__] = module  # which msgspec looks up
    exec(edited(ENTRIES, EDITS[ENTRIES]), module.__dict__)
    return module


class _Upgrade(importlib.abc.MetaPathFinder):
    """Finds the edited modules."""

    def __init__(self, edits: dict[str, dict[str, str]]) -> None:
        self._edits = dict(edits)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        edits = self._edits.pop(fullname, None)
        if edits is None:
            return None
        source = edited(fullname, edits)  # found by the other finders, as it is no longer in the table
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, "the module is there"
        assert spec.loader is not None, "it is a file"

        def execute(module: ModuleType) -> None:
            exec(compile(source, spec.origin or fullname, "exec"), module.__dict__)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if _wanted := os.environ.get("OTHER_SOURCE", ""):
    sys.meta_path.insert(0, _Upgrade(_SOURCES[_wanted]))
