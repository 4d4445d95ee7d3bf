"""A member that trains peft's adapters with transformers' Trainer: BASE RUN|new TEXT OUT.

After its first exchange the learning rate is 0: exchanges then only bring the members together. OUT gets its adapters.
"""

import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import farandole
import farandole.hf

NUM_AFTER = 3


class Still(TrainerCallback):  # type: ignore[misc]  # without its types it is Any
    """Sets the rate to 0 after an exchange, and ends the training after some more."""

    def __init__(self, ours: farandole.hf.Callback) -> None:
        self._ours = ours
        self._round, self._num_exchanges = -1, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        run = self._ours.noloco
        assert run is not None
        if run.round != self._round:
            self._round, self._num_exchanges = run.round, run.status()["exchanges_ok"]
            print(f"round {run.round}: {self._num_exchanges} exchanges", flush=True)
        if self._num_exchanges:
            for group in others["optimizer"].param_groups:  # until the Trainer's scheduler sets it again
                group["lr"] = 0.0
        control.should_training_stop = self._num_exchanges > NUM_AFTER


def main(base: str, run: str, text: str, out: str) -> None:
    """Train, and save the adapters."""
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    if run == "new":
        rounds = {"round_seconds": 1, "exchange_seconds": 30, "overlap": False}
        run = str(farandole.create_run(model, "run", base=base, rounds=rounds, outer={"codec": "fp32"}))
    ours = farandole.hf.Callback(run)
    tokens = list(text.encode())[:32]
    arguments = TrainingArguments(
        out,
        max_steps=1_000_000,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    data: Any = [{"input_ids": tokens, "labels": tokens}] * 64
    Trainer(model, arguments, train_dataset=data, callbacks=[ours, Still(ours)]).train()
    torch.save({name: each for name, each in model.named_parameters() if each.requires_grad}, f"{out}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
