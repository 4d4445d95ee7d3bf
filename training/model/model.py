"""The model: a decoder-only transformer with RMSNorm, rotary embeddings, SwiGLU and tied embeddings, in one file.

Sizes in the comments: B sequences, T tokens, C width, H heads, D = C / H, F hidden, V vocabulary.

Initial weights are a function of (seed, parameter's name) alone, so every node makes the same ones, and a stage of
the model makes the same ones as the whole. Matrices start with standard deviation 1 / sqrt(inputs). Matrices that write
into the residual stream start with 1 / sqrt(2 layers) of that (GPT-2). The tied embedding starts small enough that the
first logits are all near 0: the loss starts near ln V.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farandole.protocol.planning.needs import MAX_LOGITS
from farandole.protocol.run.manifest import ModelConfig

ROTARY_BASE = 10_000.0  # RoFormer, arXiv 2104.09864, section 3.2.2
NORM_EPSILON = 1e-6
# Standard deviation of a first logit: the embedding's is this over sqrt(C), since a normed input has length sqrt(C).
INITIAL_LOGIT_STD = 0.2


class Linear(nn.Module):
    """A matrix without bias, left uninitialised: `initialise_` fills it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., outputs) for (..., inputs)."""
        weight: Tensor = self.weight
        if weight.dtype == torch.bfloat16:  # of `farandole.training.inner.lean`; few CPUs multiply bf16 fast
            x, weight = (x, weight.to(x.dtype)) if x.device.type == "cpu" else (x.to(weight.dtype), weight)
        return F.linear(x, weight)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a gain (arXiv 1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) for (..., C)."""
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), NORM_EPSILON)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_heads = model.num_heads
        self.qkv = Linear(model.width, 3 * model.width)
        self.out = Linear(model.width, model.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) for (B, T, C), with the angles' tables (T, D / 2); ``mask`` as from `document_mask`."""
        B, T, C = x.shape
        qk, v = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads).split((2, 1), dim=2)
        q, k = rotate(qk, cos[:, None, None], sin[:, None, None]).transpose(1, 3).unbind(2)  # each (B, H, T, D)
        v, mask = v.transpose(1, 3).squeeze(2), None if mask is None else mask.to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]  # (B, T, C)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(model.width, 2 * model.hidden)
        self.down = Linear(model.hidden, model.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, T, F)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]  # (B, T, C)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.width)
        self.attention = Attention(model)
        self.mlp_norm = RMSNorm(model.width)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) for (B, T, C), with the angles' tables (T, D / 2); ``mask`` as from `document_mask`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]  # (B, T, C)


Onward = Callable[[Tensor, Tensor], Tensor]
"""Returns what later stages make of tokens (B, T) and the first one's (B, T, C)."""


class StageModule(nn.Module, abc.ABC):
    """A model, or a stage of it, whose first stage has both ends: it embeds the tokens and makes the logits."""

    onward: Onward | None = None
    """Asks the later stages, where they are elsewhere."""

    @abc.abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T)."""

    @abc.abstractmethod
    def advance(self, x: Tensor) -> Tensor:
        """(B, T, C) for (B, T, C), through this module's layers."""

    @abc.abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) for tokens (B, T), of the whole model."""
        return self.logits(self.last_hidden(tokens))

    def last_hidden(self, tokens: Tensor) -> Tensor:
        """The last layer's (B, T, C) for tokens (B, T), of the whole model."""
        x = self.advance(self.embed(tokens))
        return x if self.onward is None else self.onward(tokens, x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """`cross_entropy` of the last layer's (B, T, C) and targets (B, T)."""
        return cross_entropy(self.logits(x), targets)


class LanguageModel(StageModule):
    """A model whose head treats each token by itself.

    So a loss over many logits is computed in chunks of `MAX_LOGITS`, and the chunks' logits again in the backward pass:
    a microbatch of 16 x 1,024 tokens with a vocabulary of 128 k would keep 8 GB of logits otherwise. Each chunk's
    gradient is the plain loss's, and all are added in a fixed order.
    """

    vocabulary: int
    """V."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for tokens (B, T), of the whole model; with targets (B, T), their `loss`."""
        last = self.last_hidden(tokens)
        return self.logits(last) if targets is None else self.loss(last, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Implement `StageModule.loss`."""
        if targets.numel() * self.vocabulary <= MAX_LOGITS:
            return super().loss(x, targets)

        def summed(x: Tensor, targets: Tensor) -> Tensor:
            return StageModule.loss(self, x, targets) * targets.numel()

        size = max(1, MAX_LOGITS // self.vocabulary)
        total = x.new_zeros((), dtype=torch.float32)
        for x_chunk, targets_chunk in zip(x.flatten(0, 1).split(size), targets.flatten().split(size), strict=True):
            total = total + checkpoint(
                summed, x_chunk[None], targets_chunk[None], use_reentrant=False, preserve_rng_state=False
            )
        return total / targets.numel()


class Transformer(LanguageModel):
    """The whole model, or a stage of it: some of its layers, and in the first stage both ends.

    The ends are the embedding, which is the head as well, and the last norm: the stage that embeds the tokens also
    makes the logits, so the tied weights have one owner, and tokens never leave it. Parameters have the names that
    they have in the whole model. They are uninitialised until `initialise_`; `build_model` does both.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, layers: range | None = None, *, has_ends: bool = True) -> None:
        super().__init__()
        if has_ends:
            self.embedding = Linear(model.width, model.vocabulary)  # (V, C); it is the head as well
        self.vocabulary = model.vocabulary
        layers = range(model.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in layers})
        if has_ends:
            self.norm = RMSNorm(model.width)
        self.recomputes = False
        """Whether layers keep only their inputs for the backward pass, which computes them again (arXiv 1604.06174).
        Gradients are the same; an inner step takes about a third longer."""
        self.separator: int | None = None
        """The token with which a document begins, where tokens attend to their own document alone; None: to all before.
        See `document_mask`; for a whole model."""
        cos, sin = rotary_tables(model.context, model.width // model.num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T, C) for tokens (B, T), fp32 even of bf16 weights: layers add to it, and bf16 would drop small terms."""
        x = F.embedding(tokens, self.embedding.weight)
        return x.float() if x.dtype == torch.bfloat16 else x

    def last_hidden(self, tokens: Tensor) -> Tensor:
        """Implement `LanguageModel.last_hidden`, with the mask of the documents if there is a separator."""
        if self.separator is None:
            return super().last_hidden(tokens)
        x = self.embed(tokens)
        # In the layers' own precision: they share one mask, where each would keep its own copy for the backward pass.
        kind = tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return self.advance(x, document_mask(tokens, self.separator, dtype))

    def advance(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) for (B, T, C), through this module's layers; ``mask`` as from `document_mask`."""
        T = x.size(1)
        for layer in self.layers.values():
            args = x, self.cos[:T], self.sin[:T], mask
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*args)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V) for the last layer's (B, T, C)."""
        return self.embedding(self.norm(x))  # type: ignore[no-any-return]


def document_mask(tokens: Tensor, separator: int, dtype: torch.dtype) -> Tensor:
    """Bias (B, 1, T, T) of attention among tokens (B, T): 0 to a token and those before it in its document, else -inf.

    A document begins with its separator, which alone predicts its first token, and ends before the next one, which it
    predicts from its own tokens. So no target is predicted from another document, and all count in the loss. Llama 3
    (arXiv 2407.21783, section 3.2) masks documents. Rotary positions go on: attention depends on distances only.
    """
    documents = (tokens == separator).cumsum(-1, dtype=torch.int32)  # (B, T)
    is_seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    return torch.zeros_like(is_seen, dtype=dtype).masked_fill(~is_seen, -math.inf)


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of each next token in (B, T + 1)."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if isinstance(getattr(model, "_orig_mod", model), LanguageModel):  # as it is, or as torch.compile wraps it
        return model(inputs, targets)  # type: ignore[no-any-return]
    return cross_entropy(model(inputs), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets (B, T), in nats a token, of logits (B, T, V)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_model(model: ModelConfig, seed: int, layers: range | None = None, *, has_ends: bool = True) -> Transformer:
    """The model, or a stage of it, with the initial weights of the run's seed, in fp32 on the CPU."""
    transformer = Transformer(model, layers, has_ends=has_ends)
    initialise_(transformer, seed, model.num_layers)
    return transformer


def initialise_(module: nn.Module, seed: int, num_layers: int) -> None:
    """Fill every parameter; ``num_layers`` is the whole model's."""
    stds = {name: 1.0 / math.sqrt(parameter.size(-1)) for name, parameter in module.named_parameters()}
    for name in stds:
        if name == "embedding.weight":
            stds[name] *= INITIAL_LOGIT_STD
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            stds[name] /= math.sqrt(2 * num_layers)
    fill_(module, seed, stds)


@torch.no_grad()
def fill_(module: nn.Module, seed: int, stds: Mapping[str, float]) -> None:
    """Fill biases with 0, gains of norms with 1, and matrices from a generator keyed with (seed, the name)."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        digest = hashlib.sha256(f"farandole/init/1\n{seed}\n{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        parameter.normal_(0.0, stds[name], generator=generator)


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (T, D / 2)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)  # (D / 2)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies  # (T, D / 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D / 2) in the last dimension of x (..., D) by angles' tables (..., D / 2)."""
    a, b = x.chunk(2, dim=-1)  # each (..., D / 2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
