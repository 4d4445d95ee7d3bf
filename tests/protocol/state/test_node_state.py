from __future__ import annotations

import math

import msgspec
import pytest

from farandole.protocol.state.entries import PARTNER_BYTES, Beat, Progress
from farandole.protocol.state.node_state import NodeState, TrainingState, beat_of, progress_of, training_of
from farandole.protocol.wire.identity import peer_id_of

BOB = b"b" * 32


@pytest.mark.parametrize(
    ("loss", "told"), [(None, None), (2.5, 2_500_000), (math.nan, None), (math.inf, 2**31 - 1), (1e9, 2**31 - 1)]
)
def test_any_state_has_a_heartbeat(loss: float | None, told: int | None) -> None:
    state = NodeState(round=2**40, inner_steps=7, tokens=9, tokens_per_second=3.9, loss=loss, partner=peer_id_of(BOB))
    assert beat_of(state) == Beat(7, 2**31 - 1, told, 3, BOB[:PARTNER_BYTES])
    assert beat_of(NodeState()).partner == b""
    assert progress_of(state, 4, 5) == Progress(7, 2**31 - 1, 9, 4, 5)


def test_the_training_is_a_part_of_the_state() -> None:
    state = NodeState(round=3, phase="paused", stage=2)
    training = training_of(state)
    assert type(training) is TrainingState
    assert NodeState(**msgspec.structs.asdict(training), phase="paused", stage=2) == state
