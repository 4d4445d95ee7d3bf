"""Settings that exclude each other: one table, by which manifests and nodes refuse, and which the reference prints.

A setting of a manifest is named by its path and is in use where it differs from its default. A node's setting is named
by its flag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec


class Exclusion(NamedTuple):
    """A setting, those that it excludes, and why."""

    setting: str
    others: tuple[str, ...]
    reason: str


STAGES: Final = "model.num_stages"
LOOP: Final = "--trainer external"
OTHER_MODELS: Final = ("model.hf", "model.own")

EXCLUSIONS: Final = (
    Exclusion(
        "audits",
        (STAGES, *OTHER_MODELS),
        "others replay a round from its start alone, and these models need other nodes, or draw random numbers",
    ),
    Exclusion(
        "audits",
        ("rounds.overlap", "rounds.partners", "data.epochs"),
        "a replay takes one outer step between two rounds, on the text that a node draws by itself",
    ),
    Exclusion(
        "rounds.partners",
        ("rounds.overlap", "outer.fragments", STAGES, "model.external"),
        "several meetings follow one another while inner steps wait, each of the whole model, which nodes train "
        "themselves",
    ),
    Exclusion(
        "data.mask_documents",
        (*OTHER_MODELS, STAGES),
        "masks need farandole's own attention, and only the first stage has the tokens",
    ),
    Exclusion(
        "model.external",
        ("tokenizer", "data", "inner", "pipeline", "audits"),
        "each member's own loop chooses its text and its inner steps",
    ),
    Exclusion(
        "--lean",
        (STAGES, *OTHER_MODELS, "inner.deterministic"),
        "weights in bf16 are rounded at random by farandole's own optimizer, for a whole model",
    ),
    Exclusion(
        LOOP,
        (STAGES, "inner.deterministic", "data.epochs", "data.mask_documents", "rounds.partners"),
        "a member's own loop brings its own model, text and inner steps, and takes steps before each exchange",
    ),
    Exclusion("--recompute", OTHER_MODELS, "these models' layers are computed by code of others"),
    Exclusion("--compile", ("inner.deterministic", STAGES), "compiled code has other bits, and is of a whole model"),
    Exclusion(
        "data.epochs",
        ("--stream",),
        "each document is trained on once an epoch, which needs all of the text beforehand",
    ),
    Exclusion("--stream", ("--data",), "streams take turns, each with the same share, and no files"),
)


def exclusions_in(manifest: msgspec.Struct, flags: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each pair of settings in use that exclude each other; it begins with the first one's name.

    ``flags``: the node's settings in use.
    """
    for setting, others, reason in EXCLUSIONS:
        if is_used(manifest, setting, flags):
            for other in others:
                if is_used(manifest, other, flags):
                    yield f"{setting} and {other} exclude each other: {reason}"


def why_no_loop(manifest: msgspec.Struct) -> str:
    """Return why no member may train this run in a loop of its own; empty if members may.

    A loop (`farandole.training.cluster.external`) exchanges whole contributions in the order of the model's parameters,
    as a built-in trainer does. What a manifest says of inner steps does not bind it.
    """
    return next(exclusions_in(manifest, [LOOP]), "")


def is_used(manifest: msgspec.Struct, setting: str, flags: Collection[str] = ()) -> bool:
    """Return whether a setting that `EXCLUSIONS` names is in use."""
    if setting.startswith("--"):
        return setting in flags
    *sections, name = setting.split(".")
    section: Any = manifest
    for part in sections:
        section = getattr(section, part)
    return bool(getattr(section, name) != _default_of(section.__class__, name))


@cache  # a plan weighs thousands of manifests, and msgspec evaluates all annotations of a struct each time
def _default_of(section: type[msgspec.Struct], name: str) -> object:
    (field,) = (field for field in msgspec.structs.fields(section) if field.name == name)
    return field.default
