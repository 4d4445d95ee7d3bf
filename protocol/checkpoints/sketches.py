"""Sketches: a newcomer compares a checkpoint with other members' weights by them, for a kilobyte each.

A newcomer takes the weights of one member. Held-out text shows whether they are worse than a fresh start's, but not for
a stage of a model. So the newcomer also asks other members how far their own weights are from these.

A sketch is a count sketch of one row (Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams",
2002): each weight has a random sign and is added to one of `NUM_BUCKETS` random buckets. It is linear, so the sketch of
a difference is the difference of the sketches. The squared norm of this is an unbiased estimate of the squared distance
with a variance of at most 2 / `NUM_BUCKETS` times its square: a standard error of 9 %, and of 4.5 % for the distance.
Relative to a norm that is estimated too, it is 6.5 % (measured with 200 seeds). SketchGuard (arXiv 2510.07922) screens
neighbours in decentralised learning by such distances.

The newcomer draws signs and buckets, by a seed, when it has the checkpoint's index. The index has the hashes of all
blocks, so no author can make weights that are far from others' while their sketch under this seed is near. From then on
the members can compute while the newcomer downloads.

A member's answer is not verified, and only the newcomer acts on it. `judge` counts answers, so that a few liars can
make a checkpoint neither fit nor unfit. `docs/threat-model.md` describes what other liars gain.
"""

from __future__ import annotations

import enum
import math
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ..state.entries import Sha256
from ..wire.errors import RemoteProtocolError
from ..wire.messagepack import MessageDecoder, encode

SKETCH_PROTOCOL: Final = "/farandole/sketch/1"
SEED_BYTES: Final = 32
NUM_BUCKETS: Final = 256
SKETCH_BYTES: Final = 4 * NUM_BUCKETS
MAX_QUESTION_BYTES: Final = 128
MAX_ANSWER_BYTES: Final = SKETCH_BYTES + 16
# Number of members that are asked: of seven answers four decide, so three liars do not. Each answer is a kilobyte, and
# work for a donor.
MAX_JUDGES: Final = 7
# Relative distances (`distance`). Honest replicas of small models were 0.2 to 29 % apart (the most with int4), and up
# to 54 % from weights five rounds older in the first rounds, 2 to 39 % later. Noise, or weights of another seed, are
# 100 % away or more; weights that are twice as large, 50 %.
NEAR: Final = 0.3
"""Smaller distances are near, however near the others are to each other: they may have averaged a moment ago."""
FAR: Final = 0.6
"""Larger distances are far, however far the others are from each other."""
TIMES_USUAL: Final = 3.0
"""Between the two, a distance is near if it is at most this many times the distance of the others to each other."""

Sketch = tuple[float, ...]
"""`NUM_BUCKETS` finite numbers."""


class SketchQuestion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for the sketch of the other's own newest weights of a stage."""

    run_id: Sha256
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    seed: Sha256


_Answer = tuple[Annotated[bytes, msgspec.Meta(max_length=SKETCH_BYTES)]]
"""The sketch, fp32, little-endian; empty: the other has no weights of the stage, or no time."""
decode_question: Final = MessageDecoder[SketchQuestion](SketchQuestion, "a question for a sketch")
_decode_answer: Final = MessageDecoder[_Answer](_Answer, "a sketch")
_FLOATS: Final = struct.Struct(f"<{NUM_BUCKETS}f")


def encode_answer(sketch: bytes) -> bytes:
    """Encode an answer, in at most `MAX_ANSWER_BYTES`; ``sketch`` is empty where there is none."""
    return encode((sketch,))


def decode_answer(payload: bytes) -> Sketch | None:
    """Return the sketch in an answer, None if the other has none; raise `RemoteProtocolError` if it is malformed."""
    (raw,) = _decode_answer(payload)
    if not raw:
        return None
    if len(raw) != SKETCH_BYTES:
        raise RemoteProtocolError(f"a sketch has {SKETCH_BYTES} bytes, not {len(raw)}")
    sketch = values_of(raw)
    if not all(map(math.isfinite, sketch)):
        raise RemoteProtocolError("a sketch holds a value that is not finite")
    return sketch


def values_of(sketch: bytes) -> Sketch:
    """Return the numbers of a sketch of `SKETCH_BYTES` bytes, finite or not."""
    return _FLOATS.unpack(sketch)


def distance(one: Sketch, other: Sketch) -> float:
    """Estimate the norm of the difference of the weights, relative to the larger norm: 0 to 2, or not a number."""
    largest = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / largest if largest > 0.0 else 0.0


def choose_judges(members: Sequence[bytes], suspects: Collection[bytes], networks: Mapping[bytes, str]) -> list[bytes]:
    """Choose members to ask about a checkpoint: at most `MAX_JUDGES`, from as many networks as possible.

    ``members``: the members that have weights of the stage, the best first, without the checkpoint's author.
    ``suspects``: the author and the members that hold or serve the checkpoint, which may belong to one person; they are
    asked only where there is no other, and members from their networks after others. ``networks``: the network of each
    member that this node has reached.
    """
    judges = [member for member in members if member not in suspects] or list(members)
    seen = Counter({networks[suspect]: 1 for suspect in suspects if suspect in networks})
    order: dict[bytes, int] = {}
    for judge in judges:
        network = networks.get(judge, "")
        order[judge] = seen[network]
        seen[network] += 1
    return sorted(judges, key=order.__getitem__)[:MAX_JUDGES]


class SketchVerdict(enum.Enum):
    """The result of a comparison."""

    UNKNOWN = "no member answered"
    FIT = "near to others' weights"
    DISPUTED = "far from the weights of the one member that answered"
    """Either weights may be a liar's."""
    UNFIT = "far from most others' weights"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, with the distances that it is based on."""

    verdict: SketchVerdict
    distances: tuple[float, ...] = ()
    """From the checkpoint to each member's weights, the least first."""
    bound: float = FAR
    """Distances up to this are near."""
    num_silent: int = 0
    """The members that were asked, if none answered."""

    def __str__(self) -> str:
        text = ", ".join(f"{each:.0%}" if math.isfinite(each) else "not finite" for each in self.distances)
        return f"{self.verdict.value} ({text} away; up to {self.bound:.0%} is near)" if text else self.verdict.value


def judge(checkpoint: Sketch, members: Sequence[Sketch]) -> Judgement:
    """Compare a checkpoint with the weights of members that have answered.

    It is fit if it is near to at least half of them: its author makes that a majority. The bound of near follows from
    how far the nearest majority of the members are from each other. A minority cannot make this larger, and `NEAR`
    keeps it from making the bound too small by copying another's sketch.
    """
    if not members:
        return Judgement(SketchVerdict.UNKNOWN)
    distances = tuple(
        sorted(
            (distance(checkpoint, each) for each in members),
            key=lambda value: value if math.isfinite(value) else math.inf,
        )
    )
    bound = FAR if len(members) == 1 else min(max(NEAR, TIMES_USUAL * usual_distance(members)), FAR)
    num_near = sum(each <= bound for each in distances)
    if 2 * num_near >= len(members):
        return Judgement(SketchVerdict.FIT, distances, bound)
    return Judgement(SketchVerdict.DISPUTED if len(members) == 1 else SketchVerdict.UNFIT, distances, bound)


def usual_distance(members: Sequence[Sketch]) -> float:
    """Return the least radius, around one of at least two members, that contains a majority of them."""
    num_others = len(members) // 2  # with the one in the middle, more than half
    radii = (
        sorted(distance(one, other) for k, other in enumerate(members) if k != i)[num_others - 1]
        for i, one in enumerate(members)
    )
    return min(radii)
