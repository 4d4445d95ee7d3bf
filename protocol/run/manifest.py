"""The run manifest: what a run is, fixed for its whole life and signed by its creator.

The run id is the SHA-256 of the manifest's bytes and the creator's key, so a manifest from any peer proves itself. It
is kept and passed on as the bytes that were signed, and never encoded again. Every field is validated here and nowhere
else: what the rest of farandole reads in a `Manifest` is in range.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..wire.errors import ManifestError, RemoteProtocolError, UnknownManifestError
from ..wire.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, is_signed_by, public_bytes, public_key_of, sign
from .exclusions import exclusions_in
from .families import HFConfig
from .families.base import NumLayers
from .own_model import MAX_PARAMETERS, ExternalModel, OwnModel, problems_of
from .roster import Roster
from .rules import DEFAULT_SCREENING, Codec, NoLoCoConfig, OuterRules, RoundConfig, ScreeningRules, with_known
from .slices import NUM_PARTS, PART_BYTES

# A manifest holds settings, not data: 64 fields of at most a few hundred bytes each, and for one's own module without
# sections the shapes of some 1,000 parameters. Checked before anything is parsed.
MAX_MANIFEST_BYTES = 64 * 1024
RUN_ID_BYTES = 32
_DOMAIN = b"farandole/manifest/1"

_NAME_FORM = "a text in quotes, 1 to 64 letters, digits, spaces and . : + - _"
_DIGEST_FORM = "64 hexadecimal digits, small letters, in quotes"

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w .:+-]+$", description=_NAME_FORM)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NonNegative = Annotated[float, msgspec.Meta(ge=0)]
# Zero only for one's own module, which defines its own.
_Width = Annotated[int, msgspec.Meta(ge=0, le=65_536)]
_NumHeads = Annotated[int, msgspec.Meta(ge=0, le=1_024)]
# Zero only for an external model.
_Context = Annotated[int, msgspec.Meta(ge=0, le=1_048_576)]
_Vocabulary = Annotated[int, msgspec.Meta(ge=0, le=2_000_000)]
_Hidden = Annotated[int, msgspec.Meta(ge=0, le=262_144)]
_PeerId = Annotated[str, msgspec.Meta(max_length=64)]
# 1,000 peer ids of 52 letters, which leave room for the rest of a manifest.
_Members = Annotated[tuple[_PeerId, ...], msgspec.Meta(min_length=1, max_length=1_000)]
_UnitInterval = Annotated[float, msgspec.Meta(ge=0, lt=1)]
InnerName = Literal["adamw", "muon"]
"""The inner optimizers."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer: RMSNorm, rotary embeddings, SwiGLU, tied embeddings; or another kind of model."""

    num_layers: NumLayers
    """Layers of attention and SwiGLU."""
    width: _Width
    """Width of the activations between layers."""
    num_heads: _NumHeads
    """Heads of attention; they divide the width."""
    hidden: _Hidden
    """Width of the SwiGLU layer."""
    context: _Context
    """Tokens a sequence."""
    vocabulary: _Vocabulary
    """Number of different tokens."""
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=512)] = 1
    """Contiguous groups of layers, each held by other nodes; 1: every node holds the whole model."""
    stage_layers: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=512)], ...], msgspec.Meta(max_length=512)] = ()
    """Layers of each stage; empty: cut by what is counted. Stage 0, which has both ends of the model, may have none."""
    hf: HFConfig | None = None
    """A Hugging Face model's own settings, which the sizes above follow from; null: farandole's own model."""
    own: OwnModel | None = None
    """One's own module, made by a function that each volunteer has installed and allowed; null: none. Of the sizes
    above it has no ``num_heads`` and ``hidden``, and without sections no ``width``: these are 0."""
    external: ExternalModel | None = None
    """A model that each member trains in a loop of its own; null: nodes train it. Of the sizes above it has none:
    ``num_layers`` is 1, the others are 0."""


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Source of the text. A manifest never names a path: each volunteer passes their copy with ``--data``."""

    source: Literal["stdlib", "text"] = "stdlib"
    """``stdlib``: the sources of the node's own Python; ``text``: files or folders that the volunteer names."""
    held_out: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.05
    """Share of the documents, chosen by hash, that no node trains on; where none is chosen, the end of the text."""
    epochs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Number of passes over the text, split among the nodes by leases (`protocol.epochs.leases`), after which the
    run is over. 0: each node draws on its own, without end."""
    mask_documents: bool = False
    """Whether tokens attend to their own document alone (Llama 3, arXiv 2407.21783, section 3.2)."""

    @property
    def shares_text(self) -> bool:
        """Whether all members have the same text, but for their versions of Python."""
        return self.source == "stdlib" or self.epochs > 0


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``bytes`` (256 tokens), or a Hugging Face ``tokenizers`` file, known by its hash; each node names its copy."""

    kind: Literal["bytes", "tokenizers"] = "bytes"
    """``bytes``: each byte is a token; ``tokenizers``: a file of Hugging Face ``tokenizers``."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$", description=_DIGEST_FORM)] = ""
    """SHA-256 of that file; empty for bytes."""


class InnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inner optimizer and its learning rate, with linear warm-up.

    Defaults: NoLoCo, arXiv 2506.10911 (Adam, no decay, clip 1).
    """

    learning_rate: _Positive = 6e-4
    """The highest rate, at the end of the warm-up."""
    min_learning_rate_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """The rate at the end of the schedule, as a share of the highest."""
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 1_000
    """Inner steps in which the rate rises from 0."""
    total_steps: _Count = 25_000
    """Inner steps of one replica after which the learning rate stays at its least."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the rate falls after the warm-up: as a cosine; or ``wsd`` (arXiv 2404.06395), stable until the last
    ``decay_share`` of ``total_steps``, and then linearly."""
    decay_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2
    """Share of ``total_steps`` in which ``wsd`` lowers the rate."""
    beta1: _UnitInterval = 0.9
    """Share that AdamW's mean of gradients keeps in a step."""
    beta2: _UnitInterval = 0.95
    """Share that AdamW's mean of squared gradients keeps in a step."""
    epsilon: _Positive = 1e-8
    """Added by AdamW to the root of that mean."""
    weight_decay: _NonNegative = 0.0
    """Decoupled weight decay, of AdamW and Muon."""
    clip: _NonNegative = 1.0
    """Largest norm of a gradient; 0 clips nothing."""
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 16
    """Sequences an inner step."""
    optimizer: InnerName = "adamw"
    """``muon``: steps of matrices are made orthogonal (`training.inner.optimizer`); embedding, head, norms and biases
    get AdamW's steps, with the same rate."""
    momentum: _UnitInterval = 0.95
    """Share of its momentum that a step of Muon keeps."""
    deterministic: bool = False
    """Whether the same steps give the same bits on all machines of one class: one release of PyTorch, one kind of
    processor or GPU (`farandole.training.base.determinism`). Each trainer then computes on one thread."""


class PipelineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the pipeline: microbatches passing through the stages of a model that is cut into several."""

    microbatch_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1
    """Sequences; ``inner.batch_size`` is a multiple of it."""
    codec: Codec = "bf16"
    """How activations travel."""
    gradient_codec: Codec | None = None
    """How their gradients travel; by default as activations do. ``int4`` cost 0.3 % of loss."""
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """Most microbatches that a node has begun and not ended; this bounds its memory."""
    recompute: bool = False
    """Whether nodes keep only a microbatch's input and compute twice: less memory, a third more work."""
    microbatch_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=3_600)] = 30.0
    """A microbatch that has not come back after this time is dropped."""
    overlap: bool = False
    """Whether nodes begin the next inner step's microbatches while the last of this one's are under way.

    Without it, every step waits for as long as a microbatch takes through all stages and back. With it, the gradients
    of microbatches begun early are one inner step late, and nodes keep two more copies of their stage's weights, and a
    sum. If all gradients are late, 240 steps of 0.2 M parameters end with 8 % more loss with Muon, and 14 % with AdamW
    (three seeds).
    """

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Return the codecs of activations, and of their gradients."""
        return self.codec, self.gradient_codec or self.codec


class EpochsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of the data's epochs in an earlier run. A run that starts from its checkpoint continues there."""

    run_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$", description=_DIGEST_FORM)]
    """Id of the run that the order of the slices is from."""
    corpus: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
    """Hash of the text. Nodes with another one begin with the first epoch."""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    done: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*$", max_length=2 * NUM_PARTS * PART_BYTES)] = ""
    """Sections of this epoch that are done: one bit each (`protocol.run.slices`), the least significant first."""

    @property
    def order(self) -> bytes:
        """Id of the run that the order is from, 32 bytes."""
        return bytes.fromhex(self.run_id)

    @property
    def mask(self) -> int:
        """The sections that are done."""
        return int.from_bytes(bytes.fromhex(self.done), "little")


class StartConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights that a run starts from, instead of from its seed: a consolidated checkpoint, by its content."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$", description=_DIGEST_FORM)]
    """Id of the checkpoint: SHA-256 of its index (`farandole.protocol.checkpoints.blocks`), in hexadecimal."""
    run_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$", description=_DIGEST_FORM)]
    """Id of the run that made it; all zeros for a model that was imported."""
    inner_steps: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0
    """Inner step at which the learning rate's schedule continues."""
    tokens: Annotated[int, msgspec.Meta(ge=0, le=2**56)] = 0
    """Tokens that its weights were trained on."""
    epochs: EpochsConfig | None = None
    """Null: the first epoch of the data, or no epochs."""

    @property
    def checkpoint(self) -> bytes:
        """The checkpoint's id, 32 bytes."""
        return bytes.fromhex(self.id)

    @property
    def run(self) -> bytes:
        """Id of the run that made it, 32 bytes."""
        return bytes.fromhex(self.run_id)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training run. Immutable: another setting is another run."""

    name: _Name
    """The run's name, for people."""
    model: ModelConfig
    version: Literal[1] = 1
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights and of what each node draws."""
    created_at: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0
    """Unix seconds, for people; nothing depends on it."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterRules = NoLoCoConfig()
    rounds: RoundConfig = RoundConfig()
    pipeline: PipelineConfig = PipelineConfig()
    screening: ScreeningRules = DEFAULT_SCREENING
    admission: Literal["open", "invited"] | _Members = "open"
    """``open``: anyone may join; ``invited``: anyone with an invite signed by the creator, or by a member that the
    creator lets invite (`farandole.protocol.run.invitations`); a list of peer ids: only these."""
    private: bool = False
    """Whether connections need a key that only invites contain (`farandole.protocol.run.invite`)."""
    start: StartConfig | None = None
    """Null: the weights are initialised from the seed."""
    audits: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the rounds of each member that others replay (`protocol.rounds.audits`); 0: rounds are not committed
    to. Costs each member about 1.2 times this share of its time, and five checkpoints of its disk."""

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ManifestError(*problems)

    def roster(self, run_id: bytes, creator: bytes) -> Roster | None:
        """Return the roster of the members that the manifest admits; None if it admits everyone."""
        if self.admission == "open":
            return None
        is_listed = not isinstance(self.admission, str)
        listed = frozenset(public_key_of(peer_id) for peer_id in self.admission) if is_listed else None
        return Roster(run_id, creator, listed)

    @property
    def step_tokens(self) -> int:
        """Tokens of a built-in trainer's inner step, by which its schedule counts; 0: only loops train."""
        return 0 if self.model.external is not None else self.inner.batch_size * self.model.context

    def slice_order(self, run_id: bytes) -> bytes:
        """Return the id of the run whose slice order this run uses: its own, ``run_id``, or an earlier run's.

        A run that continues the epochs of another one keeps that one's order.
        """
        return run_id if self.start is None or self.start.epochs is None else self.start.epochs.order


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield the problems that the fields' own bounds miss: in their relations, and NaN, which passes every bound.

    Each begins with the name of its setting, such as ``outer.gamma``.
    """
    model, rounds = manifest.model, manifest.rounds
    for name in ("data", "inner", "rounds", "pipeline"):
        for field, value in msgspec.structs.asdict(getattr(manifest, name)).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{name}.{field} is {value}: it must be a finite number"
    yield from manifest.outer.problems
    yield from exclusions_in(manifest)
    for peer_id in () if isinstance(manifest.admission, str) else manifest.admission:
        try:
            public_key_of(peer_id)
        except RemoteProtocolError:
            yield f"admission names {peer_id!r}, which is no peer id"
    if not rounds.inner_steps and not rounds.round_seconds:
        yield "rounds.inner_steps and rounds.round_seconds are both 0: a round would never end"
    if manifest.outer.momentum_codec != "none" and manifest.inner.optimizer != "muon" and model.external is None:
        yield f"outer.momentum_codec is {manifest.outer.momentum_codec}: only inner.optimizer = muon has a momentum"
    if model.external is not None:
        if model != ModelConfig(1, 0, 0, 0, 0, 0, external=model.external):
            yield "model.external has no sizes, no stages: num_layers is 1, the others are 0, and there is nothing else"
        if model.external.num_parameters > MAX_PARAMETERS:
            yield f"model.external has more than {MAX_PARAMETERS} parameters"
        yield from problems_of("model.external", model.external.parameters)
        return
    yield from _problems_of_model(model)
    if model.num_stages > 1 and manifest.inner.batch_size % manifest.pipeline.microbatch_size:
        yield (
            f"inner.batch_size ({manifest.inner.batch_size}) must be a multiple of pipeline.microbatch_size "
            f"({manifest.pipeline.microbatch_size})"
        )
    if manifest.tokenizer.kind == "bytes" and model.vocabulary < 256:
        yield f"model.vocabulary is {model.vocabulary}: the byte-level tokenizer has 256 tokens"
    if (manifest.tokenizer.kind == "tokenizers") != bool(manifest.tokenizer.sha256):
        yield (
            "tokenizer.sha256 names the file of kind 'tokenizers', and is empty for kind 'bytes'. In a run file write "
            'file = "tokenizer.json" in place of both'
        )
    if model.num_stages > 1 and not rounds.round_seconds:
        yield "rounds.round_seconds is 0: with stages, a round that waits for others' microbatches needs an end"
    if manifest.audits and not manifest.inner.deterministic:
        yield (
            f"audits = {manifest.audits:g} needs inner.deterministic = true: otherwise two replays of one round differ"
        )


def _problems_of_model(model: ModelConfig) -> Iterator[str]:
    for name, least in (("context", 8), ("vocabulary", 2)):
        if getattr(model, name) < least:
            yield f"model.{name} is {getattr(model, name)}: it must be at least {least}"
    if model.own is not None:
        yield from _problems_of_own(model, model.own)
    elif model.hf is not None:
        for name, size in model.hf.sizes.items():
            if getattr(model, name) != size:
                yield f"model.{name} is {getattr(model, name)}, but model.hf makes it {size}"
        if model.context > model.hf.max_context:
            yield f"model.context is {model.context}, but model.hf goes to {model.hf.max_context}"
    elif model.width < 8 or model.num_heads < 1 or model.hidden < 8:
        yield (
            f"model.width ({model.width}) and model.hidden ({model.hidden}) must be at least 8, model.num_heads "
            f"({model.num_heads}) at least 1"
        )
    elif model.width % model.num_heads or model.width // model.num_heads % 2:
        yield (
            f"model.width ({model.width}) must be an even multiple of model.num_heads ({model.num_heads}): "
            "rotary embeddings turn pairs"
        )
    if model.num_stages > model.num_layers + 1:
        yield (
            f"model.num_stages is {model.num_stages}: {model.num_layers} layers, and the first stage, which may have "
            f"the model's ends alone, make {model.num_layers + 1} stages at most"
        )
    layers = model.stage_layers
    if layers and (len(layers) != model.num_stages or sum(layers) != model.num_layers or not all(layers[1:])):
        yield (
            f"model.stage_layers is {list(layers)}: it must deal out model.num_layers ({model.num_layers}) to "
            f"model.num_stages ({model.num_stages}), at least one to each but the first"
        )


def _problems_of_own(model: ModelConfig, own: OwnModel) -> Iterator[str]:
    for setting in own.config.values():
        for value in setting if isinstance(setting, list) else [setting]:
            if isinstance(value, float) and not math.isfinite(value):
                yield f"model.own.config has {value}: numbers must be finite"
    yield from problems_of("model.own", own.ends)
    if model.hf is not None:
        yield "model.own and model.hf name two models: a run has one"
    if model.num_heads or model.hidden or bool(model.width) != own.has_sections:
        yield (
            f"model.num_heads is {model.num_heads}, model.hidden {model.hidden} and model.width {model.width}: all are "
            "0 of one's own module, but for the width of one with sections"
        )
    if not own.has_sections and (model.num_layers > 1 or model.num_stages > 1):
        yield (
            f"model.num_stages is {model.num_stages} and model.num_layers {model.num_layers}, but model.own "
            f"{own.function} makes a module without sections: it trains whole, as one"
        )
    if own.num_parameters(model.num_layers) > MAX_PARAMETERS:
        yield f"model.own has more than {MAX_PARAMETERS} parameters"


class SignedManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest as it travels: the signed bytes, the creator's key and signature."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)]
    creator: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    @property
    def run_id(self) -> bytes:
        """32 bytes: SHA-256 of the manifest's bytes and the creator's key."""
        return hashlib.sha256(self.body + self.creator).digest()

    def encode(self) -> bytes:
        """The bytes that are stored and sent."""
        return msgspec.msgpack.encode(self)


def sign_manifest(manifest: Manifest, creator: Ed25519PrivateKey) -> SignedManifest:
    """Sign a manifest. The result is final, and determines the run id."""
    body = msgspec.msgpack.encode(manifest)
    return SignedManifest(body, public_bytes(creator), sign(creator, _DOMAIN, body))


def decode_manifest(raw: bytes, run_id: bytes | None = None) -> tuple[Manifest, SignedManifest]:
    """Parse and verify a manifest from a peer or a file.

    Raises `ManifestError` if it is too long, malformed, badly signed, or not of the run ``run_id``. Raises
    `UnknownManifestError` if it is none of these, but has fields or values that are not known here.
    """
    if len(raw) > 2 * MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest has at most {2 * MAX_MANIFEST_BYTES} bytes, this has {len(raw)}")
    try:
        fields = msgspec.msgpack.decode(raw, type=list[Any])  # a later release may have appended some
        signed = msgspec.convert(fields[:3], SignedManifest)
        if run_id is not None and signed.run_id != run_id:
            raise ManifestError(f"this manifest is of run {signed.run_id.hex()[:16]}, not of {run_id.hex()[:16]}")
        if not is_signed_by(signed.creator, signed.signature, _DOMAIN, signed.body):
            raise ManifestError("the manifest's signature is not its creator's")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(
            f"not a manifest ({error}). If it is a run file, sign it first, with `farandole run create`"
        ) from error
    try:
        msgspec.convert(fields, SignedManifest)
        return decode_body(signed.body), signed
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownManifestError(
            f"run {signed.run_id.hex()[:16]} has settings that this version of farandole does not know ({error}): "
            "upgrade this node (docs/volunteer.md#upgrade)"
        ) from error


def decode_body(body: bytes) -> Manifest:
    """Decode a manifest's signed bytes. Raises `msgspec.MsgspecError`, or `ValueError` for what is not UTF-8."""
    return _converted(msgspec.msgpack.decode(body))


def _converted(settings: object) -> Manifest:
    if isinstance(settings, dict):
        settings = with_known(settings)
        if isinstance(outer := settings.get("outer"), Mapping) and outer.get("codec") == "topk":
            raise UnknownManifestError("outer.codec = topk is no longer there: this run needs an earlier farandole")
    return msgspec.convert(settings, type=Manifest, strict=True)


def manifest_from_dict(settings: object) -> Manifest:
    """Make a manifest from its settings. Raises `ManifestError`, which names the field that is wrong.

    A run file is explained better by `farandole.node.store.run_file`.
    """
    try:
        return _converted(settings)
    except msgspec.ValidationError as error:
        raise ManifestError(str(error)) from error
