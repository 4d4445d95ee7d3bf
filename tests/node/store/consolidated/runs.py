"""Small runs that have really trained, their checkpoints as nodes save them, and measures of consolidated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from farandole.node.store.consolidated.folder import Consolidated, consolidate, read_folder
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import EpochsConfig, Manifest, SignedManifest, decode_body, sign_manifest
from farandole.protocol.run.models import stage_of
from farandole.protocol.run.rules import NoLoCoConfig, required_vectors
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.engine.learner import Learner, build_learner

from ....protocol.run import test_families as families

TOLERANCE = 1e-5
VECTORS = required_vectors(NoLoCoConfig())
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)  # the same run each time
LLAMA: dict[str, Any] = {**families.LLAMA, "rope_theta": 500_000.0, "rope_scaling": families.LLAMA_3_ROPE}
GPT2 = families.GPT2
MODELS: dict[str, dict[str, Any]] = {
    "own": {"preset": "tiny", "context": 16},
    "llama": {"hf": LLAMA, "context": 16},
    "gpt2": {"hf": GPT2, "context": 16},
}


def manifest_for(model: dict[str, Any], **settings: Any) -> SignedManifest:
    inner = {"batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 0, "total_steps": 100} | settings.pop("inner", {})
    return sign_manifest(manifest_of({"name": "a", "model": model, "inner": inner} | settings, Path(), 0), KEY)


def decoded(signed: SignedManifest) -> Manifest:
    return decode_body(signed.body)


def learner_of(signed: SignedManifest, author: bytes = bytes(32)) -> Learner:
    """Return a learner of the whole model, even if the manifest cuts it."""
    return build_learner(decoded(signed), run_id=signed.run_id, author=author, settings=TrainerSettings(device="cpu"))


def trained(signed: SignedManifest, author: bytes, steps: int = 6, rounds: int = 2) -> Learner:
    """Return a replica that was alone for some rounds."""
    learner = learner_of(signed, author)
    for _ in range(rounds):
        for _ in range(steps):
            learner.learn()
        learner.round_end.apply(None)
    return learner


def save_stages(learner: Learner, signed: SignedManifest, folder: Path, name: str) -> list[Path]:
    """Save the learner's checkpoint, or one for each stage, as if one node held each."""
    folder.mkdir(exist_ok=True)
    whole = folder / f"{name}.safetensors"
    learner.checkpoint.save(whole)
    model = decoded(signed).model
    if model.num_stages == 1:
        return [whole]
    tensors = load_file(whole)
    with safe_open(whole, framework="pt") as file:
        metadata = file.metadata()
    paths = []
    for stage in range(model.num_stages):
        part = {key: tensor for key, tensor in tensors.items() if stage_of(model, key.partition("/")[2]) == stage}
        paths.append(folder / f"{name}-{stage}.safetensors")
        save_file(part, paths[-1], metadata)
    return paths


def pulled(
    signed: SignedManifest, to: Path, learner: Learner | None = None, epochs: EpochsConfig | None = None
) -> Consolidated:
    """Return the consolidated checkpoint of one replica, by default of one that was alone for a step; in ``to``."""
    learner = learner or trained(signed, b"a" * 32, steps=1, rounds=1)
    stages = save_stages(learner, signed, to.parent, "replica")
    consolidate(to, KEY, signed.encode(), [[stage] for stage in stages], VECTORS, epochs)
    return read_folder(to)


@torch.no_grad()
def assert_same_logits(theirs: Any, ours: nn.Module, tokens: Tensor) -> None:
    """Compare with transformers' model, in fp64 and in fp32; leave both models in fp32.

    Two programs that do the same in another order may differ by `TOLERANCE`, in fp32 as a share of the largest logit.
    """
    for dtype in (torch.float64, torch.float32):
        expected = ours.to(dtype)(tokens)
        difference = float((theirs.to(dtype)(tokens).logits - expected).abs().max())
        largest = float(expected.abs().max())
        print(f"{dtype}: logits up to {largest:.2f}, off by {difference:.1e} at most")
        assert difference < TOLERANCE * (1.0 if dtype == torch.float64 else largest)
