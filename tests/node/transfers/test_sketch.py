"""The sketch of a checkpoint's file: a function of its slow weights and the seed, near to which it keeps distances."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest

from farandole.node.transfers import sketches as sketching
from farandole.protocol.checkpoints.sketches import NUM_BUCKETS, distance, values_of
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.safetensors import encode_header

Floats = npt.NDArray[np.float32]
GOLDEN = [-402.0, 1767.0, 1501.0, 972.0]
RNG = np.random.default_rng(1)
SHAPES: Mapping[str, tuple[int, ...]] = {"slow/a": (301, 70), "slow/b": (13,), "slow/c": (70_003,)}


def weights() -> dict[str, Floats]:
    return {name: RNG.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def file_of(by_name: Mapping[str, Floats]) -> bytes:
    header = encode_header({}, [(name, tensor.shape) for name, tensor in by_name.items()])
    return header + b"".join(tensor.astype("<f4").tobytes() for tensor in by_name.values())


def sketch_of(raw: bytes, seed: bytes = b"s" * 32) -> bytes:
    def read(start: int, end: int) -> bytes:
        return raw[start:end]

    return sketching.sketch_of(read, len(raw), seed, lambda: None)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_distances_of_sketches_are_near_to_those_of_weights(share: float) -> None:
    ours, steps = weights(), weights()
    theirs = {name: tensor + np.float32(share) * steps[name] for name, tensor in ours.items()}
    flat = [np.concatenate([tensor.ravel() for tensor in each.values()]) for each in (ours, theirs)]
    norms = [float(np.linalg.norm(vector)) for vector in (*flat, flat[0] - flat[1])]
    true, files, errors = norms[2] / max(norms[:2]), (file_of(ours), file_of(theirs)), []
    for number in range(40):
        sketches = [values_of(sketch_of(raw, bytes([number]) * 32)) for raw in files]
        errors.append(distance(*sketches) / true - 1)
    assert abs(float(np.mean(errors))) < 0.05
    assert float(np.std(errors)) < 1.5 * math.sqrt(2 * 2 / NUM_BUCKETS) / math.sqrt(2)
    assert max(map(abs, errors)) < 0.3


def test_a_change_that_is_made_for_one_seed_is_found_under_another() -> None:
    """So a newcomer draws the seed when it has the hashes of the weights."""
    seed, ours = b"s" * 32, RNG.standard_normal(1_000, np.float32)
    places: dict[int, tuple[int, float]] = {}
    poison = ours.copy()
    for i in range(NUM_BUCKETS + 1):
        only = values_of(sketch_of(file_of({"slow/w": (np.arange(ours.size) == i).astype(np.float32)}), seed))
        ((bucket, sign),) = [(bucket, value) for bucket, value in enumerate(only) if value]
        if bucket in places:  # two weights in one bucket, whose changes cancel
            poison[i] += 1e4 * sign
            poison[places[bucket][0]] -= 1e4 * places[bucket][1]
            break
        places[bucket] = i, sign

    def apart(seed: bytes) -> float:
        one, other = (values_of(sketch_of(file_of({"slow/w": flat}), seed)) for flat in (ours, poison))
        return distance(one, other)

    assert apart(seed) < 0.01
    assert apart(b"t" * 32) > 0.9


def test_it_is_the_same_for_any_order_in_the_file_and_whatever_else_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = weights()
    sketch = sketch_of(file_of(ours))
    others = {name.replace("slow", "momentum"): tensor for name, tensor in weights().items()}
    assert sketch_of(file_of(dict(reversed(ours.items())) | others)) == sketch
    assert sketch_of(file_of(ours), b"t" * 32) != sketch
    monkeypatch.setattr(sketching, "_PIECE", sketching._STEP)
    assert sketch_of(file_of(ours)) == sketch


def test_all_nodes_and_releases_make_the_same() -> None:
    weights, seed = np.arange(1_001, dtype=np.float32), b"s" * 32
    key = hashlib.sha256(b"farandole/sketch/1" + seed).digest()[:16]
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(251)
    expected = [0.0] * NUM_BUCKETS
    for i, weight in enumerate(weights):
        bits = int(draws[i // 4]) >> 16 * (i % 4)
        expected[bits & 255] += -float(weight) if bits & 256 else float(weight)
    assert values_of(sketch_of(file_of({"slow/w": weights}), seed)) == tuple(expected)
    assert expected[:4] == GOLDEN


def test_no_number_of_a_liars_harms_it() -> None:
    signalling = np.array([0x7FA0_0000], "<u4").view("<f4")[0]
    for value in (math.nan, signalling, math.inf, 3e38):
        sketch = values_of(sketch_of(file_of({"slow/w": np.full(100_000, value, np.float32)})))
        assert not all(map(math.isfinite, sketch))
    assert values_of(sketch_of(file_of({"mean/w": np.ones(3, np.float32)}))) == (0.0,) * NUM_BUCKETS
    with pytest.raises(RemoteProtocolError):
        sketch_of(b"\0" * 100)
