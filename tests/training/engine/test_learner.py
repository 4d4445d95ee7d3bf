"""The batch of an inner step in parts, for a machine that has no memory for the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from farandole.protocol.run.manifest import InnerConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import is_out_of_memory
from farandole.training.base.errors import DataError, TrainingError
from farandole.training.data.dataset import Text
from farandole.training.engine.learner import Learner

from ..conftest import MakeReplica


def learner(make_replica: MakeReplica, microbatch_size: int, *, is_compiled: bool = False) -> Learner:
    return make_replica(
        inner_settings=InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=6),
        settings=TrainerSettings(microbatch=microbatch_size, compile=is_compiled),
    )


@pytest.mark.parametrize("microbatch_size", [1, 3, 4, 5])  # of 6: equal parts, and a shorter last one
def test_microbatches_sum_to_the_batchs_gradient_and_loss(make_replica: MakeReplica, microbatch_size: int) -> None:
    whole, parts = learner(make_replica, 0), learner(make_replica, microbatch_size)
    for _ in range(3):
        loss = whole.learn()
        torch.testing.assert_close(parts.learn(), loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(parts.replica.gradient, whole.replica.gradient, rtol=1e-4, atol=1e-7)
        # AdamW makes more of a rounding where a gradient is nearly 0.
        parts.round_end.weights.flat.copy_(whole.round_end.weights.flat)
    assert (parts.totals.steps, parts.totals.tokens) == (whole.totals.steps, whole.totals.tokens)
    assert parts.evaluate(2) == pytest.approx(whole.evaluate(2), rel=1e-6)


def test_a_loss_that_cannot_be_measured_changes_nothing_of_the_training(make_replica: MakeReplica, text: Text) -> None:
    """One's own module may have dropout, which is off while the loss is measured."""
    without = make_replica(text=replace(text, held_out=text.held_out[:1]))
    for _ in range(2):
        without.learn()
        with pytest.raises(DataError, match="too little text is held out"):
            without.evaluate()
        assert without.replica.module.training


Forward = Callable[..., object]


def test_inner_steps_run_through_the_compiled_module(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that leaves everything as it is, and counts."""
    calls: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
        def forward(*args: object) -> object:
            calls.append(len(args))
            return module.forward(*args)

        return forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, compiled = learner(make_replica, 3), learner(make_replica, 3, is_compiled=True)
    assert len(calls) == 1, "compiled before the first inner step"
    for _ in range(2):
        torch.testing.assert_close(compiled.learn(), plain.learn())
    assert len(calls) == 1 + 2 * 2, "of two microbatches each"
    torch.testing.assert_close(compiled.round_end.weights.flat, plain.round_end.weights.flat)


def test_a_compiler_that_is_missing_is_told_with_what_to_do(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
        raise FileNotFoundError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with pytest.raises(TrainingError, match=r"No working C\+\+ compiler found.* apt install g\+\+ .* --compile"):
        learner(make_replica, 0, is_compiled=True)


def test_a_tensor_for_which_there_is_no_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as no_bytes:
        bytearray(2**62)
    assert is_out_of_memory(no_bytes.value)
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as mismatch:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_out_of_memory(mismatch.value)
