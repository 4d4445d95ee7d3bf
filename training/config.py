"""The settings that training reads: the manifest's sections of the same names, which `node/` converts field by field.

They are values without checks: the manifest, validated where it enters, is the one place that refuses settings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary embeddings, SwiGLU, tied embeddings; or another kind of model."""

    num_layers: int
    width: int
    num_heads: int
    hidden: int
    """Width of the SwiGLU layer."""
    context: int
    """Tokens a sequence."""
    vocabulary: int = 256
    num_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: see `stages.cut`."""
    hf: str = ""
    """A Hugging Face model's own settings (`hf`), as JSON that states each; empty: farandole's own model."""
    own: str = ""
    """One's own module (`own_model`), as the manifest states it, in JSON; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where text comes from."""

    source: str = "stdlib"
    """``stdlib``: the sources of this Python; ``text``: files or folders that the volunteer names."""
    held_out: float = 0.05
    """Share of the documents that no node trains on, chosen by the hash of their names."""
    epochs: int = 0
    """How often the run trains on the whole of the text, slice by slice; 0: each node draws on its own."""
    order: bytes = b""
    """Id of the run in whose order slices are, if this one goes on with its epochs; empty: this run's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """``bytes`` (256 tokens), or a Hugging Face ``tokenizers`` file, known by its hash."""

    kind: str = "bytes"
    sha256: str = ""
    """Hexadecimal; of the file, for kind ``tokenizers``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """AdamW with linear warm-up and cosine decay. Defaults: NoLoCo, arXiv 2506.10911 (Adam, no decay, clip 1)."""

    learning_rate: float = 6e-4
    min_learning_rate_ratio: float = 0.1
    warmup_steps: int = 1_000
    total_steps: int = 25_000
    """Inner steps of one replica after which the learning rate stays at its least."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices; the gains of the norms never decay."""
    clip: float = 1.0
    """Largest norm of a gradient; 0 clips nothing."""
    batch_size: int = 16
    """Sequences an inner step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The NoLoCo step: see `noloco`."""

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    momentum: str = "heavy_ball"
    """``heavy_ball`` or ``nesterov``."""
    codec: str = "fp32"
    """How a contribution travels: one of `codec.CODECS`, or ``topk``."""
    topk: int = 64
    """Of each 256 elements, how many the codec ``topk`` sends."""
    error_feedback: bool | None = None
    """Whether what the codec rounds away is added to the next contribution; None: where it helps, with int4."""

    fragments: int = 1
    """Parts into which the flat vector of parameters is cut; a round exchanges one of them."""

    @property
    def feeds_errors_back(self) -> bool:
        """``error_feedback``, decided."""
        return self.codec == "int4" if self.error_feedback is None else self.error_feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How microbatches go through the stages: see `stage_worker`."""

    microbatch_size: int = 1
    """Sequences."""
    codec: str = "bf16"
    """How activations and their gradients travel: one of `codec.CODECS`."""
    recompute: bool = False
    """Whether a stage keeps its input alone, and takes the forward pass again when it is time for the backward."""
    overlap: bool = False
    """Whether an inner step's microbatches may begin while the last of the one before are under way."""
