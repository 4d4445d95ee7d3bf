from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from farandole.protocol.run.manifest import InnerConfig, ModelConfig
from farandole.training.inner.optimizer import learning_rate, matrices_of
from farandole.training.model.model import build_model, language_loss

from ..conftest import MakeReplica, train, weights_of

MUON = InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=4, weight_decay=0.1, optimizer="muon")


def test_matrices_are_all_but_the_models_ends_and_have_one_vector_of_state(make_replica: MakeReplica) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm(4)
            self.mix = nn.Linear(4, 8)
            self.lm_head = nn.Linear(4, 10)
            self.filters = nn.Conv1d(4, 4, 3)

    model = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=24, context=16, vocabulary=64)

    assert matrices_of(Own()) == {"mix.weight"}
    assert matrices_of(build_model(model, 0)) == {
        "layers.0.attention.qkv.weight",
        "layers.0.attention.out.weight",
        "layers.0.mlp.gate_up.weight",
        "layers.0.mlp.down.weight",
    }
    node = make_replica(inner_settings=MUON)
    squares = {name.partition("/")[2] for name in node.checkpoint.tensors() if name.startswith("square/")}
    assert squares == set(node.checkpoint.layout.shapes) - matrices_of(node.replica.module)


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [("muon", "nesterov"), ("adamw", "nesterov"), ("adamw", "heavy_ball")]
)
def test_a_run_of_one_is_plain_training_with_torchs_optimizers_bit_for_bit(
    make_replica: MakeReplica,
    model: ModelConfig,
    optimizer: str,
    momentum: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Muon or AdamW for matrices, and AdamW for the rest.

    With alpha 0 and beta 1 the outer step alone changes nothing: what is left is a loop anybody would write.
    """
    # torch's Muon iterates in bf16 on any device, a node on the CPU in fp32; nothing else of either uses bf16 here.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float32, copy=True))
    inner = msgspec.structs.replace(MUON, optimizer=optimizer)
    node = make_replica(inner_settings=inner, alpha=0.0, beta=1.0, gamma=1.0, momentum=momentum)
    plain = build_model(model, 7)
    matrices = [parameter for name, parameter in plain.named_parameters() if name in matrices_of(plain)]
    rest = [parameter for name, parameter in plain.named_parameters() if name not in matrices_of(plain)]
    decay = MUON.weight_decay

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        betas = MUON.beta1, MUON.beta2
        return torch.optim.AdamW(parameters, betas=betas, eps=MUON.epsilon, weight_decay=decay, foreach=False)

    of_rest = adamw(
        [
            {"params": [parameter for parameter in rest if parameter.ndim > 1]},
            {"params": [parameter for parameter in rest if parameter.ndim == 1], "weight_decay": 0.0},
        ]
    )
    of_matrices = adamw(matrices)
    if optimizer == "muon":
        of_matrices = torch.optim.Muon(
            matrices, weight_decay=decay, momentum=MUON.momentum, adjust_lr_fn="match_rms_adamw"
        )

    for step in range(30):
        plain.zero_grad()
        loss = language_loss(plain, torch.from_numpy(node.sampler.batch(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), MUON.clip)
        for each in (of_matrices, of_rest):
            for group in each.param_groups:
                group["lr"] = learning_rate(step, MUON)
            each.step()

        assert float(node.learn()) == float(loss.detach())
        if step % 5 == 4:
            node.round_end.apply(None)

    assert torch.equal(node.round_end.fast_weights(), weights_of(plain))
    assert torch.equal(node.round_end.slow_weights(), weights_of(plain))
    assert (node.totals.round, node.totals.steps, node.totals.tokens) == (6, 30, 30 * 4 * 16)
    assert node.round_end.tokens_this_round == 0


def test_another_optimizers_vectors_are_not_continued(make_replica: MakeReplica, tmp_path: Path) -> None:
    """A run that starts from another one's checkpoint may have another inner optimizer."""
    node, successor = make_replica(inner_settings=MUON), make_replica()
    train(node, 4)
    node.round_end.apply(None)
    node.checkpoint.save(tmp_path / "checkpoint")

    successor.checkpoint.start_from(tmp_path / "checkpoint", 20, 0)

    assert torch.equal(successor.round_end.slow_weights(), node.round_end.slow_weights())
    assert not any(bool(successor.checkpoint.vectors()[name].any()) for name in ("mean", "square"))
    assert successor.replica.optimizer.begun_at == 20, "the rate is ramped up"
