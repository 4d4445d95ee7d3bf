"""`transformers.Trainer` trains with other members of a run, with only a callback added."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import farandole

if TYPE_CHECKING:
    import transformers


def small_gpt2() -> transformers.GPT2LMHeadModel:
    import transformers

    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.filterwarnings("default")
def test_a_trainer_takes_outer_steps_between_its_own(tmp_path: Path) -> None:
    """Each of its steps is an inner step, however many batches it accumulates; an outer step follows every fourth."""
    import transformers  # takes a second, also of testers that do not run this

    import farandole.hf

    class Rounds(transformers.TrainerCallback):
        """Records the round and status of farandole's callback after each step."""

        def __init__(self, ours: farandole.hf.Callback) -> None:
            self._ours = ours
            self.rounds: list[int] = []
            self.status: dict[str, Any] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            assert self._ours.noloco is not None
            self.rounds.append(self._ours.noloco.round)
            self.status = self._ours.noloco.status()

    run = farandole.create_run(
        small_gpt2(), tmp_path / "run", rounds={"inner_steps": 4, "round_seconds": 0, "exchange_seconds": 0.1}
    )
    model = small_gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # the run's weights replace them
    with pytest.raises(TypeError, match="tokens_per_stepp"):
        farandole.hf.Callback(run, tokens_per_stepp=3)
    ours = farandole.hf.Callback(run)
    seen = Rounds(ours)
    data = [{"input_ids": list(range(n, n + 16)), "labels": list(range(n, n + 16))} for n in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=12,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[ours, seen])
    trainer.train()
    assert ours.noloco is None
    assert len(seen.rounds) == 12
    assert seen.rounds[-1] >= 1
    assert seen.status["run"]["run_id"]
    assert seen.status["loss"] is not None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] < 4.0, "ln 32 is 3.5: these are the run's weights, not this model's"
    assert losses[-1] < losses[0]
