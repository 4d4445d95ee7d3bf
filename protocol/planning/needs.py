"""Requirements of a run on each member: bandwidth, memory and disk, computed from its manifest. Imports no torch.

*Line.* A contribution must be transferred in `TRANSFER_SHARE` of ``exchange_seconds``. The partner may take
`WAIT_SHARE` of ``exchange_seconds`` to become ready, and both need the end of what remains for their verdicts and the
decision (`DATA_UNTIL`). A line that carries a contribution in that time exchanges in every round. A slower one
exchanges only where the partner is ready early, and one that takes more than `DATA_UNTIL` of ``exchange_seconds`` never
does.

*Memory.* A trainer holds a number of flat fp32 vectors (`farandole.training.engine.replica`), and two buffers that it
shares with the mesh process. A GPU holds the weights, the gradient and AdamW's two vectors. The other vectors are in
the host's memory, except where the GPU has ample room and where the model is cut. With `--lean` the GPU's vectors are
bf16 (`farandole.training.inner.lean`). `tests/training/engine/test_needs.py` compares this with what PyTorch counts; it
was not compared on a real GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..exchange.exchange import DATA_UNTIL
from ..rounds.pairing_waits import WAIT_SHARE
from ..run.manifest import Manifest
from ..run.models import layers_of, parts_of, stage_parameters
from ..run.rules import OPTIMIZER_VECTORS, RoundConfig, encoded_bytes, required_bytes, required_vectors
from ..wire.safetensors import FP32_BYTES

# Share of exchange_seconds that is always left for both contributions.
TRANSFER_SHARE: Final = (1 - WAIT_SHARE) * DATA_UNTIL
# Bandwidth in bytes per second each way that a run for homes may require: most homes have 20 Mbit/s up.
USUAL_RATE: Final = 2_500_000.0
# Memory that most volunteers' machines have.
USUAL_MEMORY: Final = 16_000_000_000
# Resident memory of a trainer on the CPU with an empty model, and of a mesh process without contributions.
TRAINER_BYTES: Final = 400_000_000
MESH_BYTES: Final = 130_000_000
# Flat vectors of inner steps: weights, gradient, AdamW's two. Flat vectors of every outer step in addition to its
# rule's: slow weights and, in the host's memory of a GPU machine, a copy of the weights.
_NUM_INNER, _NUM_OUTER, _NUM_COPIED = 4, 1, 1
# A verdict tries weights of a fragment in place of the node's own.
_VERDICT_VECTORS: Final = 1
# Autocast keeps the weights in bf16 as well, unless they are.
_AUTOCAST_BYTES: Final = 2
_BF16_BYTES: Final = 2
# Numbers kept per token for the backward pass: by a layer, in widths and in widths of its SwiGLU layer; by both ends,
# in widths and vocabularies. Counted with PyTorch's hooks in models of 3 to 125 million parameters.
_LAYER_WIDTHS, _LAYER_HIDDEN, _END_WIDTHS, _END_VOCABULARIES = 12, 4, 3, 2
MAX_LOGITS: Final = 1 << 26
"""Logits that a loss computes at a time, 256 MiB in fp32: 512 tokens of a vocabulary of 128 k. Where a microbatch has
more, the head is computed in chunks, and again in the backward pass
(`farandole.training.model.model.LanguageModel`)."""
# Checkpoints on the disk: two kept and one being written, two of another's; five more where rounds are audited; and
# the run state and logs (`farandole.node.store.disk_space`).
_NUM_OWN, _NUM_LEAST, _NUM_COPIES, _NUM_AUDITED, _OTHER_BYTES = 3, 2, 2, 5, 128_000_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory in bytes of a node that takes one sequence at a time."""

    host: int
    """Trainer and mesh process together."""
    device: int = 0
    """On the GPU."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a run on a member that holds the largest stage, or the whole model."""

    num_parameters: int
    contribution_bytes: int
    """Size of the largest fragment, one way; the same amount comes back at the same time."""
    transfer_seconds: float
    """Time in which a contribution must be transferred."""
    latest_seconds: float
    """Time in which it must be transferred if the partner is ready at once."""
    join_bytes: int
    """Size of a newcomer's download."""
    checkpoint_bytes: int
    disk_bytes: int
    """Disk for all checkpoints that a member keeps if it can, and its other files."""
    least_disk_bytes: int
    """Disk for the newest checkpoint, and the one that replaces it."""
    on_cpu: Memory
    on_gpu: Memory
    all_on_gpu: Memory
    """Memory if all is on the GPU, as of a cut model."""
    lean_on_gpu: Memory
    """Memory with `--lean`, which a cut model refuses."""
    hop_bytes: int
    """Sent for each token that passes through a stage: its activations or gradients, once on and once back."""

    @property
    def rate(self) -> float:
        """Bytes per second each way at which every exchange is in time."""
        return self.contribution_bytes / self.transfer_seconds

    @property
    def least_rate(self) -> float:
        """Bytes per second below which no exchange can be in time."""
        return self.contribution_bytes / self.latest_seconds

    def seconds(self, rate: float) -> float:
        """Return the seconds that a contribution takes at ``rate`` bytes per second."""
        return self.contribution_bytes / rate

    def memory(self, *, has_gpu: bool, is_lean: bool = False) -> Memory:
        """Return the memory for a trainer on the GPU, or on the CPU, where being lean saves nothing."""
        return self.on_cpu if not has_gpu else self.lean_on_gpu if is_lean else self.on_gpu


def needs_of(manifest: Manifest) -> Needs:
    """Compute the requirements on a member that holds the stage with the most parameters."""
    stages = range(manifest.model.num_stages)
    largest = max(stages, key=lambda stage: stage_parameters(manifest.model, stage))
    return needs_of_stage(manifest, largest)


def needs_of_stage(manifest: Manifest, stage: int, *, recomputes: bool = False) -> Needs:
    """Compute the requirements on a member that holds ``stage``; ``recomputes``: with `--recompute`."""
    outer, rounds = manifest.outer, manifest.rounds
    num_parameters = stage_parameters(manifest.model, stage)
    num_fragment = -(-num_parameters // outer.fragments)
    contribution = encoded_bytes(outer.codec, num_fragment)
    num_matrices = num_parameters - (parts_of(manifest.model).ends if stage == 0 else 0)
    num_momenta = 0 if outer.momentum_codec == "none" else min(num_matrices, num_fragment)
    if num_momenta:
        contribution += encoded_bytes(outer.momentum_codec, num_momenta)
    is_cut = manifest.model.num_stages > 1
    # Vectors of a checkpoint; of outer steps; of a fragment: before, as sent if the codec changes it, and as received.
    num_saved = len(required_vectors(outer)) + len(OPTIMIZER_VECTORS) + (outer.fragments > 1)
    num_outer = _NUM_OUTER + len(outer.vectors)
    num_outer += rounds.partners > 1  # the last movement
    num_exchanged = 2 + (outer.codec != "fp32")
    # With Muon the layers have no mean of squares. Their norms and biases do, and are not worth counting.
    spared = 0
    if manifest.inner.optimizer == "muon":
        spared = FP32_BYTES * num_matrices
    own, joining = FP32_BYTES * num_saved * num_parameters - spared, required_bytes(outer, num_parameters)
    num_own = _NUM_OWN + (_NUM_AUDITED if manifest.audits else 0)
    num_inner = _NUM_INNER
    if is_cut:
        # Versions of the weights (`farandole.training.engine.stage_worker`), and the following inner step's sum of
        # gradients.
        overlaps = manifest.pipeline.overlap + rounds.overlap
        num_inner += (1 + overlaps if overlaps else 0) + manifest.pipeline.overlap
    inner = FP32_BYTES * num_inner * num_parameters - spared
    averaging = FP32_BYTES * (num_outer * num_parameters + num_exchanged * num_fragment + 2 * num_momenta)
    kept = activation_bytes(manifest, stage, recomputes=recomputes)
    snapshots = own * (2 if manifest.audits else 1)
    beside = 2 * contribution + snapshots + TRAINER_BYTES + MESH_BYTES
    verdict = FP32_BYTES * _VERDICT_VECTORS * num_fragment
    copied = FP32_BYTES * _NUM_COPIED * num_parameters
    learning = kept + _AUTOCAST_BYTES * num_parameters
    all_on_gpu = Memory(beside, inner + averaging + max(verdict, learning))
    on_gpu = all_on_gpu if is_cut else Memory(beside + averaging + copied + verdict, inner + learning)
    means = FP32_BYTES * len(OPTIMIZER_VECTORS) * num_parameters - spared
    halved = _BF16_BYTES / FP32_BYTES
    lean_on_gpu = Memory(int(on_gpu.host - halved * means), int(halved * inner) + kept)
    return Needs(
        num_parameters=num_parameters,
        contribution_bytes=contribution,
        transfer_seconds=TRANSFER_SHARE * rounds.exchange_seconds,
        latest_seconds=DATA_UNTIL * rounds.exchange_seconds,
        join_bytes=joining,
        checkpoint_bytes=own,
        disk_bytes=num_own * own + _NUM_COPIES * joining + _OTHER_BYTES,
        least_disk_bytes=_NUM_LEAST * own + _OTHER_BYTES,
        on_cpu=Memory(inner + averaging + max(verdict, kept) + beside),
        on_gpu=on_gpu,
        all_on_gpu=all_on_gpu,
        lean_on_gpu=on_gpu if is_cut else lean_on_gpu,
        hop_bytes=sum(encoded_bytes(codec, manifest.model.width) for codec in manifest.pipeline.codecs if is_cut),
    )


def busy_share(rounds: RoundConfig, seconds: float) -> float | None:
    """Share of its time that a trainer spends in inner steps if exchanges take ``seconds``; None without boxed rounds.

    Where rounds overlap, it waits only for an exchange that takes longer than the next round.
    """
    if not rounds.round_seconds:
        return None
    waits = max(0.0, seconds - rounds.round_seconds) if rounds.overlap else rounds.partners * seconds
    return rounds.round_seconds / (rounds.round_seconds + waits)


def activation_bytes(manifest: Manifest, stage: int, *, recomputes: bool = False) -> int:
    """Return the fp32 bytes that a trainer keeps for backward passes; 0 where the model is one's own module.

    ``recomputes``: of the layers of a whole model, it keeps the inputs, and all of the one that it computes again, with
    gradients of half of that.
    For a whole model this is for one sequence, which a trainer that runs out of memory goes down to. Under autocast on
    a GPU it is less.
    """
    model, pipeline = manifest.model, manifest.pipeline
    if model.own is not None:
        return 0
    num_layers = len(layers_of(model)[stage])
    num_tokens = model.context * (1 if model.num_stages == 1 else pipeline.microbatch_size)
    each = num_tokens * num_layers * (_LAYER_WIDTHS * model.width + _LAYER_HIDDEN * model.hidden)
    if recomputes and model.num_stages == 1:
        each = 3 * each // (2 * num_layers) + num_tokens * num_layers * model.width
    if stage == 0:
        logits = min(num_tokens * model.vocabulary, MAX_LOGITS)
        each += num_tokens * _END_WIDTHS * model.width + _END_VOCABULARIES * logits
    if manifest.data.mask_documents:
        each += model.context**2  # one mask, which all layers share
    if model.num_stages == 1:
        return FP32_BYTES * each
    if pipeline.recompute:
        return FP32_BYTES * (pipeline.in_flight * num_tokens * model.width + each)
    return FP32_BYTES * pipeline.in_flight * each
