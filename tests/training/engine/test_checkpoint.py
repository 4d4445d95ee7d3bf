from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from farandole.protocol.checkpoints.blocks import BLOCK_BYTES
from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.protocol.wire.safetensors import MAX_HEADER_BYTES
from farandole.training.base.errors import CheckpointError
from farandole.training.data.dataset import Text
from farandole.training.engine import snapshot
from farandole.training.engine.blocks import BlockHasher, content_of
from farandole.training.engine.engine import MAX_GROWTH, Fitness, fitness_of, why_unfit
from farandole.training.engine.learner import Learner
from farandole.training.engine.snapshot import SnapshotMemory
from farandole.training.inner.optimizer import learning_rate
from farandole.training.outer.contribution import copier_for

from ..conftest import ALICE, BOB, MakeReplica, copy_without, rate_of, rewrite, train
from .test_stage_worker import workers_of

Change = Callable[[dict[str, Tensor], dict[str, str]], object]


def run(node: Learner, rounds: int = 2) -> Learner:
    for _ in range(rounds):
        train(node, 4)
        node.round_end.apply(None)
    return node


def bits(node: Learner) -> list[bytes]:
    counters = (
        f"{node.totals.round} {node.totals.steps} {node.totals.tokens} {node.round_end.tokens_this_round}".encode()
    )
    return [
        counters,
        node.round_end.fast_weights().numpy().tobytes(),
        *(v.numpy().tobytes() for v in node.checkpoint.vectors().values()),
    ]


@pytest.fixture
def saved(make_replica: MakeReplica, tmp_path: Path) -> Path:
    run(make_replica()).checkpoint.save(tmp_path / "checkpoint.safetensors")
    return tmp_path / "checkpoint.safetensors"


@pytest.mark.parametrize(("fragments", "optimizer"), [(1, "adamw"), (2, "adamw"), (1, "muon")])
def test_a_run_continues_from_a_checkpoint_bit_for_bit(
    make_replica: MakeReplica, inner: InnerConfig, tmp_path: Path, fragments: int, optimizer: str
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    inner = replace(inner, optimizer=optimizer)
    node, resumed = (make_replica(inner_settings=inner, momentum="nesterov", fragments=fragments) for _ in range(2))
    content = run(node).checkpoint.save(path)

    assert resumed.checkpoint.load(path) == content == content_of(path)

    assert bits(resumed) == bits(node)
    assert bits(run(resumed)) == bits(run(node))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_snapshot_is_what_would_have_been_saved_then(make_replica: MakeReplica, tmp_path: Path) -> None:
    node = run(make_replica(codec="int4", fragments=2))
    node.learn()
    then = node.checkpoint.save(tmp_path / "then")
    for _ in range(2):  # the second one into the same memory
        snapshot = node.checkpoint.snapshot()
        assert snapshot.num_bytes == node.checkpoint.num_bytes
        run(node, 1)
        assert snapshot.save(tmp_path / "snapshot") == then
        assert (tmp_path / "snapshot").read_bytes() == (tmp_path / "then").read_bytes()
        then = node.checkpoint.save(tmp_path / "then")


def test_a_file_that_is_not_what_was_written_is_refused(make_replica: MakeReplica, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    node = run(make_replica())
    content = node.checkpoint.save(path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # the numbers are finite still
    path.write_bytes(damaged)
    before = bits(node)
    with pytest.raises(CheckpointError, match="it is not what was written"):
        node.checkpoint.load(path, content.hashes)
    assert bits(node) == before
    node.checkpoint.load(path)


def test_a_checkpoint_gives_what_a_new_one_would_until_the_next_outer_step(make_replica: MakeReplica) -> None:
    """With fragments, until the next inner step: the fast weights are in it."""
    for fragments, is_enough in ((1, True), (2, False)):
        node = run(make_replica(fragments=fragments))
        saved = node.checkpoint.counters
        assert node.checkpoint.is_in(saved.round, saved.steps)
        node.learn()
        assert node.checkpoint.is_in(saved.round, saved.steps) == is_enough
        node.round_end.apply(None)
        assert not node.checkpoint.is_in(saved.round, saved.steps)


def test_a_vector_that_is_no_longer_used_is_ignored(make_replica: MakeReplica, tmp_path: Path) -> None:
    """Nodes of a run with int4 had the codec's errors in their checkpoints, when these were fed back."""
    node, again = (make_replica(ALICE, codec="int4") for _ in range(2))
    run(node).checkpoint.save(tmp_path / "checkpoint")

    def add_errors(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
        for name in [name for name in tensors if name.startswith("slow/")]:
            tensors[name.replace("slow/", "error/")] = tensors[name].clone()

    again.checkpoint.load(rewrite(tmp_path / "checkpoint", add_errors, tmp_path / "older"))

    assert bits(again) == bits(node)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_newcomer_does_without_the_inner_optimizers_state_and_ramps_up(
    make_replica: MakeReplica, tmp_path: Path, fragments: int
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    member = run(make_replica(ALICE, momentum="nesterov", fragments=fragments))
    member.checkpoint.save(path)
    newcomer = make_replica(BOB, momentum="nesterov", fragments=fragments)

    newcomer.checkpoint.load(copy_without(path, ("mean", "square", "fast"), tmp_path / "fetched"))

    assert torch.equal(newcomer.round_end.outer.slow, member.round_end.outer.slow)
    assert torch.equal(newcomer.round_end.fast_weights(), member.round_end.outer.slow)
    assert torch.equal(newcomer.checkpoint.vectors()["momentum"], member.checkpoint.vectors()["momentum"])
    assert not bool(newcomer.checkpoint.vectors()["square"].any())
    assert rate_of(newcomer) == pytest.approx(rate_of(member) / 40)
    run(newcomer, 1)
    newcomer.checkpoint.save(path)
    again = make_replica(BOB, momentum="nesterov", fragments=fragments)
    again.checkpoint.load(path)
    assert rate_of(again) == rate_of(newcomer), "the ramp goes on after a restart"
    assert rate_of(again) < rate_of(member) / 5
    for _ in range(5):
        before = newcomer.round_end.fast_weights()
        newcomer.learn()
        moved = float((newcomer.round_end.fast_weights() - before).abs().max())
        assert moved < rate_of(member)


def put(name: str, value: float) -> Change:
    return lambda tensors, _: tensors[name].view(-1)[0].fill_(value)


def say(key: str, value: str) -> Change:
    return lambda _, metadata: metadata.update({key: value})


def gain(change: Callable[[Tensor], Tensor], name: str = "norm") -> Change:
    return lambda tensors, _: tensors.update({f"slow/{name}.weight": change(tensors.pop("slow/norm.weight"))})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("slow/norm.weight", math.nan), "not finite"),
        (put("momentum/norm.weight", math.inf), "not finite"),
        (put("square/norm.weight", -1.0), "negative square"),
        (put("slow/norm.weight", 1e30), "no weights are larger"),
        (put("momentum/norm.weight", -1e30), "no weights are larger"),
        (say("round", "-1"), "counters .*\\.round"),
        (say("steps", "9" * 5_000), "counters .*\\.steps"),
        (say("tokens", "²"), "counters .*\\.tokens"),
        (say("run_id", "ab" * 32), "of run abab"),
        (say("layout", ""), "another model"),
        (say("format", "pt"), "no farandole checkpoint"),
        (gain(lambda tensor: tensor, name="other"), "tensors are not"),
        (gain(lambda tensor: tensor.view(-1, 1)), "not fp32"),
        (gain(lambda tensor: tensor.view(torch.int32)), "not fp32"),
    ],
)
def test_a_checkpoint_that_lies_changes_nothing(
    make_replica: MakeReplica, saved: Path, change: Change, reason: str
) -> None:
    node = run(make_replica(), rounds=1)
    before = bits(node)
    rewrite(saved, change, saved)

    with pytest.raises(CheckpointError, match=reason):
        node.checkpoint.load(saved)

    assert bits(node) == before


def test_other_files_are_refused(make_replica: MakeReplica, saved: Path, tmp_path: Path) -> None:
    node = make_replica()
    raw = saved.read_bytes()
    header = int.from_bytes(raw[:8], "little")
    overlapping = json.loads(raw[8 : 8 + header])
    overlapping["slow/norm.weight"]["data_offsets"] = [0, 64]
    forged = json.dumps(overlapping).encode()
    for content in (
        b"",
        b"\0" * 8,
        pickle.dumps({"slow": [1.0]}),
        raw[:-1],
        raw + b"\0",
        b"\xff" * 8 + raw[8:],
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + raw[8:],
        raw[:8] + b"\xff" * header + raw[8 + header :],
        len(forged).to_bytes(8, "little") + forged + raw[8 + header :],
    ):
        saved.write_bytes(content)
        with pytest.raises(CheckpointError):
            node.checkpoint.load(saved)
    with pytest.raises(CheckpointError, match="cannot read"):
        node.checkpoint.load(tmp_path / "missing")
    assert bits(node) == bits(make_replica())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(position=st.integers(0, 2_000), value=st.integers(0, 255))
def test_a_damaged_header_never_surprises(make_replica: MakeReplica, saved: Path, position: int, value: int) -> None:
    raw = np.frombuffer(saved.read_bytes(), np.uint8).copy()
    raw[position] = value
    damaged = saved.with_name("damaged.safetensors")
    damaged.write_bytes(raw.tobytes())

    try:
        make_replica().checkpoint.load(damaged)
    except CheckpointError:
        return


def memory_for(num_elements: int) -> SnapshotMemory:
    vectors = {"slow": torch.zeros(num_elements), "means": torch.zeros(num_elements, dtype=torch.bfloat16)}
    return SnapshotMemory(vectors, copier_for(torch.device("cpu")))


def test_memory_that_another_process_takes_meanwhile_is_missed_in_time_and_some_is_left_to_everything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter([1 << 40, 1 << 40, 1 << 20])
    monkeypatch.setattr(snapshot, "available_bytes", lambda: next(left))
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 1 << 18)
    with pytest.raises(MemoryError, match="75712 bytes are wanted, 1048576 available"):
        memory_for(100_000)
    assert next(left, None) is None, "it was asked before each piece"
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 600_000 + snapshot._RESERVE_BYTES)
    memory_for(100_000)
    with pytest.raises(MemoryError):
        memory_for(100_001)


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_each_block_has_its_hash_however_the_bytes_come(tmp_path: Path, size: int) -> None:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, size, BLOCK_BYTES)]
    hasher, position = BlockHasher(), 0
    while position < size:
        piece = data[position : position + 300_000]
        hasher.update(piece)
        position += len(piece)
    (tmp_path / "file").write_bytes(data)

    content = hasher.content()

    assert content.hashes == b"".join(hashlib.sha256(block).digest() for block in blocks)
    assert content.size == size
    assert content == content_of(tmp_path / "file")


# The start of a run from another checkpoint


@pytest.fixture
def start(make_replica: MakeReplica, tmp_path: Path) -> tuple[Learner, Path]:
    """A replica that has learnt, and a file with its weights as another run's consolidated checkpoint has them."""
    learnt = run(make_replica())
    learnt.checkpoint.save(tmp_path / "whole")
    return learnt, copy_without(tmp_path / "whole", ("mean", "square"), tmp_path / "start")


def test_weights_momentum_and_schedule_go_on(
    start: tuple[Learner, Path], make_replica: MakeReplica, inner: InnerConfig
) -> None:
    learnt, path = start
    begun = make_replica(run_id=b"n" * 32, seed=1, codec="int4")
    begun.checkpoint.start_from(path, learnt.totals.steps, learnt.totals.tokens)
    assert torch.equal(begun.round_end.outer.slow, learnt.round_end.outer.slow)
    assert torch.equal(begun.round_end.fast_weights(), learnt.round_end.outer.slow)
    assert torch.equal(begun.checkpoint.vectors()["momentum"], learnt.checkpoint.vectors()["momentum"])
    assert not begun.checkpoint.vectors()["square"].any()
    assert (begun.totals.round, begun.totals.steps, begun.totals.tokens) == (0, 8, learnt.totals.tokens)
    assert learning_rate(0, inner) != rate_of(learnt) > rate_of(begun) > 0
    for _ in range(50):
        begun.totals.steps += 1
    assert rate_of(begun) == learning_rate(58, inner)
    begun.totals.steps = 8
    assert begun.evaluate() == pytest.approx(learnt.evaluate(), rel=1e-6)
    before = begun.evaluate()
    train(begun, 8)
    begun.round_end.apply(None)
    assert begun.evaluate() < before


def test_each_stage_takes_its_own(
    start: tuple[Learner, Path], model: ModelConfig, inner: InnerConfig, text: Text
) -> None:
    learnt, path = start
    weights = learnt.checkpoint.layout.views(learnt.round_end.outer.slow.clone())
    names = []
    for worker in workers_of(replace(model, num_layers=2), inner, text, 3):
        worker.checkpoint.start_from(path, 8, 0)
        for name, tensor in worker.checkpoint.layout.views(worker.round_end.outer.slow.clone()).items():
            assert torch.equal(tensor, weights[name])
            names.append(name)
    assert sorted(names) == sorted(weights)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tensors: tensors.pop("slow/norm.weight"), "has no slow/norm.weight"),
        (lambda tensors: tensors.pop("momentum/norm.weight"), "has no momentum/norm.weight"),
        (lambda tensors: tensors.update({"slow/norm.weight": torch.ones(3)}), "not fp32"),
        (lambda tensors: tensors["slow/norm.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors.clear(), "has no slow/"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    start: tuple[Learner, Path],
    make_replica: MakeReplica,
    spoil: Callable[[dict[str, torch.Tensor]], object],
    says: str,
) -> None:
    path = start[1]
    rewrite(path, lambda tensors, _: spoil(tensors), path)
    begun = make_replica(seed=1)
    before = begun.round_end.outer.slow.clone()
    with pytest.raises(CheckpointError, match=says):
        begun.checkpoint.start_from(path, 8, 0)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        begun.checkpoint.start_from(path, 8, 0)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        begun.checkpoint.start_from(path.with_name("gone"), 8, 0)
    assert torch.equal(begun.round_end.outer.slow, before)
    assert begun.totals.steps == 0


# Newcomers


@pytest.fixture
def learnt(make_replica: MakeReplica) -> Learner:
    replica = make_replica()
    for _ in range(10):
        replica.learn()
    replica.round_end.apply(None)
    return replica


def with_weights(replica: Learner, weights: torch.Tensor) -> Fitness:
    """The same replica with other weights, as if they had come in a checkpoint."""
    replica.round_end.weights.flat.copy_(weights)
    offset = 0
    for name, tensor in replica.checkpoint.tensors().items():
        if name.startswith("slow/"):
            tensor.copy_(weights[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()
    return fitness_of(replica)


def test_what_has_learnt_is_fit_and_noise_and_blown_up_weights_are_not(
    make_replica: MakeReplica, learnt: Learner
) -> None:
    initial, trained = fitness_of(make_replica()), fitness_of(learnt)
    assert why_unfit(trained, initial, None) == ""
    assert why_unfit(initial, initial, None) == "", "a fresh start is no worse than itself"
    weights, victim = learnt.round_end.fast_weights(), make_replica()
    noise = torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    for poison in (noise, 30.0 * weights, weights + noise):
        with torch.no_grad():
            reason = why_unfit(with_weights(victim, poison), initial, None)
        assert "their loss on held-out text is" in reason
        assert "initial weights have" in reason


def test_a_node_that_was_away_takes_none_that_are_much_worse_than_its_own(
    make_replica: MakeReplica, learnt: Learner
) -> None:
    initial, own = Fitness(5.0, 10.0), Fitness(2.0, 10.0)
    assert why_unfit(Fitness(2.4, 10.0), initial, own) == ""
    assert "this node's own have 2.000" in why_unfit(Fitness(4.0, 10.0), initial, own)
    assert why_unfit(Fitness(4.0, 10.0), initial, Fitness(math.nan, 10.0)) == "", "its own diverged"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_unfit_whatever_is_known(loss: float) -> None:
    for known in (5.0, None, math.nan):
        assert why_unfit(Fitness(loss, 1.0), Fitness(known, 1.0), None)


def test_of_a_stage_the_magnitude_alone_is_judged() -> None:
    initial = Fitness(None, 1.0)
    assert why_unfit(Fitness(None, MAX_GROWTH), initial, None) == ""
    assert "norm" in why_unfit(Fitness(None, 1.01 * MAX_GROWTH), initial, None)
    assert "norm" in why_unfit(Fitness(None, math.nan), initial, None)
