"""What a run asks of each member: line, memory, disk, computed from its manifest. Imports no torch.

*Line.* A contribution must be over in `TRANSFER_SHARE` of ``exchange_seconds``. Of the rest, the partner may take
`WAIT_SHARE` to become ready, and of what remains both need the end for their verdicts and the decision (`DATA_UNTIL`).
A line that carries it in that time exchanges in every round; a slower one only where the partner is ready early, and
one that takes more than `DATA_UNTIL` of ``exchange_seconds`` never.

*Memory.* What a trainer holds is a sum of flat fp32 vectors (`farandole.training.replica`), and of two buffers that it
shares with the mesh process. On the CPU this was compared with trainers of 30 and 125 million parameters: 57 to 59
bytes a parameter between two rounds and 65 to 67 at the peak, which is an inner step's, as computed here. On a GPU it
is computed and was not compared with any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .codec_sizes import encoded_bytes
from .cut import layers_of, stage_parameters
from .exchange import DATA_UNTIL
from .manifest import Manifest, ModelConfig, RoundConfig
from .outer_rules import OuterConfig
from .pairing import WAIT_SHARE
from .safetensors import FP32_BYTES
from .vectors import OPTIMIZER_VECTORS, required_bytes, required_vectors

# The share of exchange_seconds that is certain to be left for both contributions.
TRANSFER_SHARE: Final = (1 - WAIT_SHARE) * DATA_UNTIL
# What a line needs to have, in bytes a second each way, so that a run can call for homes: most have 20 Mbit/s up.
USUAL_RATE: Final = 2_500_000.0
# Memory that most machines of volunteers have.
USUAL_MEMORY: Final = 16_000_000_000
# A trainer on the CPU with a model of no size, and a mesh process without contributions: resident memory.
TRAINER_BYTES: Final = 400_000_000
MESH_BYTES: Final = 130_000_000
# The flat vectors that every trainer has beside those of its outer rule: weights, gradient, slow weights, AdamW's two.
_NUM_STATE: Final = 5
# Temporaries of an inner step on the CPU (`farandole.training.inner.adamw_`); on a GPU it is one fused kernel. And of a
# verdict, which tries weights of a fragment in the place of one's own.
_STEP_VECTORS, _VERDICT_VECTORS = 2, 2
# Autocast keeps the weights in bf16 as well.
_AUTOCAST_BYTES: Final = 2
# With `pipeline.overlap`: two copies of the weights, and a sum of gradients.
_OVERLAP_VECTORS: Final = 3
# Numbers that a layer keeps of each token for its backward pass, in widths and in widths of its SwiGLU layer; and both
# ends, in widths and vocabularies. Counted with PyTorch's hooks in models of 3 to 125 million parameters.
_LAYER_WIDTHS, _LAYER_HIDDEN, _END_WIDTHS, _END_VOCABULARIES = 12, 4, 3, 2
# Checkpoints on the disk: two kept and one being written, two of another's; five more where rounds are audited; and
# the run state and logs (`farandole.node.store.disk_space`).
_NUM_OWN, _NUM_LEAST, _NUM_COPIES, _NUM_AUDITED, _OTHER_BYTES = 3, 2, 2, 5, 128_000_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak, of a node with sequences of one at a time."""

    host: int
    """Trainer and mesh process together."""
    device: int = 0
    """On the GPU."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks of a member that holds the largest stage, or the whole model."""

    num_parameters: int
    contribution_bytes: int
    """Of the largest fragment, one way; as much comes back at the same time."""
    transfer_seconds: float
    """In which a contribution must be over."""
    latest_seconds: float
    """In which it must be over if the partner is ready at once."""
    join_bytes: int
    """What a newcomer downloads."""
    checkpoint_bytes: int
    disk_bytes: int
    """Of all checkpoints that a member likes to have, and what it keeps beside them."""
    least_disk_bytes: int
    """Of the newest checkpoint, and the one that replaces it."""
    on_cpu: Memory
    on_gpu: Memory
    hop_bytes: int
    """Sent for each token that passes through a stage: its activations or gradients, once on and once back."""

    @property
    def rate(self) -> float:
        """Bytes a second each way with which every exchange is in time."""
        return self.contribution_bytes / self.transfer_seconds

    @property
    def least_rate(self) -> float:
        """Bytes a second below which no exchange can be in time."""
        return self.contribution_bytes / self.latest_seconds

    def seconds(self, rate: float) -> float:
        """How long a contribution takes at ``rate`` bytes a second."""
        return self.contribution_bytes / rate

    def join_seconds(self, rate: float) -> float:
        """How long a newcomer downloads at ``rate`` bytes a second."""
        return self.join_bytes / rate

    def memory(self, *, has_gpu: bool) -> Memory:
        """Of a trainer on the GPU, or on the CPU."""
        return self.on_gpu if has_gpu else self.on_cpu


def needs_of(manifest: Manifest) -> Needs:
    """What this run asks of a member that holds the stage with the most parameters."""
    return needs_of_stage(manifest, largest_stage(manifest.model))


def needs_of_stage(manifest: Manifest, stage: int) -> Needs:
    """What this run asks of a member that holds ``stage``."""
    outer, rounds = manifest.outer, manifest.rounds
    num_parameters = stage_parameters(manifest.model, stage)
    contribution = encoded_bytes(outer.codec, -(-num_parameters // outer.fragments), outer.topk)
    num_saved = _num_saved(outer)
    own, joining = FP32_BYTES * num_saved * num_parameters, required_bytes(outer, num_parameters)
    num_own = _NUM_OWN + (_NUM_AUDITED if manifest.audits else 0)
    state = FP32_BYTES * (_num_state(manifest) * num_parameters + _num_exchanged(outer, num_parameters))
    kept = activation_bytes(manifest, stage)
    snapshots = own * (2 if manifest.audits else 1)
    beside = 2 * contribution + snapshots + TRAINER_BYTES + MESH_BYTES
    verdict = FP32_BYTES * _VERDICT_VECTORS * -(-num_parameters // outer.fragments)
    step = max(FP32_BYTES * _STEP_VECTORS * num_parameters, verdict, kept)
    is_cut = manifest.model.num_stages > 1
    return Needs(
        num_parameters=num_parameters,
        contribution_bytes=contribution,
        transfer_seconds=TRANSFER_SHARE * rounds.exchange_seconds,
        latest_seconds=DATA_UNTIL * rounds.exchange_seconds,
        join_bytes=joining,
        checkpoint_bytes=own,
        disk_bytes=num_own * own + _NUM_COPIES * joining + _OTHER_BYTES,
        least_disk_bytes=_NUM_LEAST * own + _OTHER_BYTES,
        on_cpu=Memory(state + step + beside),
        on_gpu=Memory(beside, state + max(verdict, kept + _AUTOCAST_BYTES * num_parameters)),
        hop_bytes=2 * encoded_bytes(manifest.pipeline.codec, manifest.model.width) if is_cut else 0,
    )


def largest_stage(model: ModelConfig) -> int:
    """The stage with the most parameters."""
    return max(range(model.num_stages), key=lambda stage: stage_parameters(model, stage))


def busy_share(rounds: RoundConfig, seconds: float) -> float | None:
    """Share of its time that a trainer spends in inner steps if exchanges take ``seconds``; None without boxed rounds.

    Where rounds overlap it waits only for an exchange that takes longer than the next round.
    """
    if not rounds.round_seconds:
        return None
    waits = max(0.0, seconds - rounds.round_seconds) if rounds.overlap else seconds
    return rounds.round_seconds / (rounds.round_seconds + waits)


def activation_bytes(manifest: Manifest, stage: int) -> int:
    """What a trainer keeps of microbatches for their backward passes, in fp32; 0 where the model is one's own module.

    Of a whole model for one sequence: a trainer that runs out of memory goes down to that. Under autocast on a GPU it
    is less.
    """
    model, pipeline = manifest.model, manifest.pipeline
    if model.own is not None:
        return 0
    num_layers = len(layers_of(model)[stage])
    ends = _END_WIDTHS * model.width + _END_VOCABULARIES * model.vocabulary if stage == 0 else 0
    each = num_layers * (_LAYER_WIDTHS * model.width + _LAYER_HIDDEN * model.hidden) + ends
    if model.num_stages == 1:
        return FP32_BYTES * model.context * each
    num_tokens = model.context * pipeline.microbatch_size
    kept = pipeline.in_flight * model.width + each if pipeline.recompute else pipeline.in_flight * each
    return FP32_BYTES * num_tokens * kept


def _num_state(manifest: Manifest) -> int:
    """Flat vectors that a trainer holds all the time, on its device."""
    outer = manifest.outer
    overlapped = _OVERLAP_VECTORS if manifest.model.num_stages > 1 and manifest.pipeline.overlap else 0
    return _NUM_STATE + len(outer.vectors) + overlapped + (1 if _has_memory(outer) else 0)


def _num_exchanged(outer: OuterConfig, num_parameters: int) -> int:
    """Numbers of a fragment as it was, as it was sent where that differs, as it comes, and of what to remember."""
    num_vectors = 2 + (outer.codec != "fp32") + _has_memory(outer)
    return num_vectors * -(-num_parameters // outer.fragments)


def _num_saved(outer: OuterConfig) -> int:
    """Vectors of a checkpoint."""
    num_own = len(required_vectors(outer)) + len(OPTIMIZER_VECTORS)
    return num_own + (outer.fragments > 1) + _has_memory(outer)


def _has_memory(outer: OuterConfig) -> bool:
    """Whether what the codec leaves out is remembered."""
    return outer.feeds_errors_back or outer.codec == "topk"
