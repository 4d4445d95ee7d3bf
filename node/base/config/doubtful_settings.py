"""Warnings about settings of a run that are allowed, but do not work together, or have no effect.

`farandole run create` prints them: a manifest never changes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from farandole.protocol.run.manifest import Manifest

# With ten steps to a learning rate of 1e-3, activations grew by a third at most from step to step; with two, to 2.5
# times (8 layers of width 256).
MIN_WARMUP_OF_STAGES: Final = 20


def doubtful_settings(manifest: Manifest, given: Collection[str] = ()) -> list[str]:
    """Return a warning for each combination that the creator probably does not want.

    ``given``: the settings in the run file, such as ``outer.topk`` (`farandole.protocol.planning.planning.given_by`).
    """
    return [*_of_times(manifest, given), *_of_members(manifest), *_without_effect(manifest, given)]


def _of_times(manifest: Manifest, given: Collection[str]) -> Iterator[str]:
    rounds, inner = manifest.rounds, manifest.inner
    if 0 < rounds.round_seconds < rounds.exchange_seconds:
        is_chosen = "rounds.round_seconds" in given and "rounds.exchange_seconds" not in given
        remedy = (
            "or leave it out, and it is chosen; or send less a round, with more outer.fragments"
            if is_chosen
            else "or a shorter exchange_seconds"
        )
        yield (
            f"rounds.exchange_seconds ({rounds.exchange_seconds:g}) is longer than rounds.round_seconds "
            f"({rounds.round_seconds:g}): a member may wait longer for its partner than it trains. Set a longer "
            f"round_seconds, {remedy}"
        )
    if manifest.model.external is None and inner.warmup_steps >= inner.total_steps:
        yield (
            f"inner.warmup_steps ({inner.warmup_steps}) is not less than inner.total_steps ({inner.total_steps}): the "
            "learning rate rises until the schedule ends, and is at its minimum right after. Set fewer warmup_steps, "
            "or more total_steps"
        )
    if manifest.model.num_stages > 1 and inner.warmup_steps < MIN_WARMUP_OF_STAGES:
        yield (
            f"inner.warmup_steps is {inner.warmup_steps}, and the model is in stages: without a longer warm-up, "
            "activations may double from one inner step to the next, and nodes drop what differs so much. Set "
            f"{MIN_WARMUP_OF_STAGES} or more"
        )


def _of_members(manifest: Manifest) -> Iterator[str]:
    if isinstance(manifest.admission, str):
        return
    most, num_stages = len(set(manifest.admission)) + 1, manifest.model.num_stages  # the creator is a member, too
    if most < num_stages:
        yield (
            f"admission lists {most - 1} members, and model.num_stages is {num_stages}: a node holds one stage, so "
            f"that even with the creator's {num_stages - most} of the stages have no node, and nothing is trained. "
            "List more members, or cut the model into fewer stages"
        )


def _without_effect(manifest: Manifest, given: Collection[str]) -> Iterator[str]:
    needed = {
        "outer.topk": ("outer.codec", manifest.outer.codec, "topk"),
        "inner.momentum": ("inner.optimizer", manifest.inner.optimizer, "muon"),
    }
    for name, (other, value, wanted) in needed.items():
        if name in given and value != wanted:
            yield f'{name} has no effect, because {other} is "{value}": set {other} = "{wanted}", or leave {name} out'
