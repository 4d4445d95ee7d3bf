"""Small runs that have really trained, and their checkpoints as nodes save them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import Manifest, SignedManifest, decode_body, sign_manifest
from farandole.protocol.run.models import stage_of
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.engine.learner import Learner, build_learner

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)  # the same run each time
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
}
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


def met(signed: SignedManifest, authors: list[bytes], rounds: int, steps: int) -> list[Learner]:
    """Return replicas that have averaged in random pairs."""
    rng = random.Random(1)
    learners = [learner_of(signed, author) for author in authors]
    buffers = [bytearray(learner.round_end.contribution_bytes) for learner in learners]
    for _ in range(rounds):
        for learner, buffer in zip(learners, buffers, strict=True):
            for _ in range(steps):
                learner.learn()
            learner.round_end.contribute(buffer)
        order = rng.sample(range(len(learners)), len(learners))
        for a, b in zip(order[::2], order[1::2], strict=True):
            learners[a].round_end.apply(buffers[b], own_first=True)
            learners[b].round_end.apply(buffers[a], own_first=False)
    return learners


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
