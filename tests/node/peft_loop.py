"""A member that trains peft's adapters with transformers' Trainer: BASE RUN|new TEXT OUT.

OUT gets its adapters as they were after each outer step, until enough exchanges; it trains on without end.
"""

import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import farandole
import farandole.hf
from farandole.training.screening.guard import MIN_KNOWN

NUM_EXCHANGES = MIN_KNOWN + 3  # before it has some, the guard clips partners that are ahead


def adapters_in(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of what is trained."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


class Watch(TrainerCallback):  # type: ignore[misc]  # without its types it is Any
    """Saves the adapters after each outer step, until there have been some exchanges."""

    def __init__(self, ours: farandole.hf.Callback, out: str) -> None:
        self._ours = ours
        self._out = out
        self._round: int | None = None
        self._kept: list[dict[str, torch.Tensor]] = []
        self._has_enough = False

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        run = self._ours.noloco
        assert run is not None
        if self._round is None:
            print(f"round {run.round}", flush=True)
        elif run.round != self._round and not self._has_enough:
            self._kept.append(adapters_in(others["model"]))
            if run.status()["exchanges_ok"] >= NUM_EXCHANGES:
                self._has_enough = True
                torch.save(self._kept, self._out)
                print("enough exchanges", flush=True)
        self._round = run.round


def main(base: str, run: str, text: str, out: str) -> None:
    """Train, and save the adapters."""
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    if run == "new":
        rounds = {"round_seconds": 1, "exchange_seconds": 30, "overlap": False}
        loose = {"radius": 100, "first_radius": 100, "max_radius": 1000}  # nothing is clipped
        settings: Any = {"rounds": rounds, "outer": {"codec": "fp32"}, "screening": loose}
        run = str(farandole.create_run(model, "run", base=base, **settings))
    ours = farandole.hf.Callback(run, evaluate=lambda: 1.0)  # no mean is worse, so all of it counts
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
    Trainer(model, arguments, train_dataset=data, callbacks=[ours, Watch(ours, f"{out}.pt")]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
