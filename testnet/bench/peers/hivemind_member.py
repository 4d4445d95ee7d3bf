"""A member of the race that averages with hivemind, served by ``peer.py``.

`hivemind.Optimizer` with local updates, as its documentation suggests for slow lines: a member takes inner steps of its
own, and once all members together have processed ``target_batch_size`` sequences, they average their weights in the
background. Nobody waits for the slowest member, and hivemind looks for groups, removes members that are gone, and gives
newcomers their weights by itself.

The model, batches, inner optimizer and learning-rate schedule are a node's: farandole's modules are imported from the
folders that ``begin`` names, after this environment's own packages.
"""

from __future__ import annotations

import os
import site
import threading
import time
from pathlib import Path
from typing import Any, Final

import hivemind
import torch
from hivemind.compression import Uniform8BitQuantization

RUN_ID: Final = bytes(32)
# hivemind's own default is 15 s, longer than the averages are apart here; its examples for few peers take 3 s.
MATCHMAKING_SECONDS: Final = 3.0
AVERAGING_TIMEOUT: Final = 60.0


class Peer:
    """One member; its process runs in a home of its own."""

    def __init__(self, vector: object) -> None:
        del vector  # of the other benchmarks
        self._wanted: Path | None = None
        self._saved = threading.Event()
        self._num_steps = self._num_epochs = 0

    def begin(
        self,
        folders: list[str],
        manifest: dict[str, Any],
        author: int,
        step_seconds: float,
        ip: str,
        peers: list[str],
        target: int,
        steps: int,
    ) -> dict[str, Any]:
        """Build the model, join ``peers``, and begin to train; ``steps`` is where the schedule of the rate begins.

        ``target``: sequences of all members together between two averages.
        """
        for folder in folders:
            site.addsitedir(folder)  # with its .pth files, by which a development installation is found
        from farandole.node.base.system.tuning import TRAINING_NICENESS
        from farandole.protocol.run.manifest import manifest_from_dict
        from farandole.training.data.dataset import build_sampler
        from farandole.training.model.model import build_model

        torch.set_num_threads(1)
        checked = manifest_from_dict(manifest)
        self._inner, self._step_seconds, self._num_steps = checked.inner, step_seconds, steps
        self._module = build_model(checked.model, checked.seed)
        self._sampler = build_sampler(checked, RUN_ID, author.to_bytes(32, "little"))
        dht = hivemind.DHT(initial_peers=peers, host_maddrs=[f"/ip4/{ip}/tcp/0"], start=True)
        inner = checked.inner
        self._optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="race",
            optimizer=torch.optim.AdamW(
                self._module.parameters(),
                inner.learning_rate,
                (inner.beta1, inner.beta2),
                weight_decay=inner.weight_decay,
            ),
            batch_size_per_step=inner.batch_size,
            target_batch_size=target,
            use_local_updates=True,
            delay_state_averaging=True,
            matchmaking_time=MATCHMAKING_SECONDS,
            averaging_timeout=AVERAGING_TIMEOUT,
            state_averaging_compression=Uniform8BitQuantization(),
        )
        os.nice(TRAINING_NICENESS)  # as trainers are
        threading.Thread(target=self._learn, daemon=True).start()
        return {"addresses": [str(address) for address in dht.get_visible_maddrs()]}

    def _learn(self) -> None:
        """Take inner steps, each at least as long as this member's, without end."""
        from safetensors.torch import save_file

        from farandole.training.inner.optimizer import learning_rate
        from farandole.training.model.model import language_loss

        while True:
            began_at = time.monotonic()
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(self._num_steps, self._inner)
            self._optimizer.zero_grad()
            language_loss(self._module, torch.as_tensor(self._sampler.batch(self._num_steps))).backward()
            if self._inner.clip:
                torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._inner.clip)
            self._optimizer.step()
            self._num_steps += 1
            self._num_epochs = self._optimizer.local_epoch
            if self._wanted is not None:
                weights = {f"slow/{name}": weight.detach() for name, weight in self._module.named_parameters()}
                save_file(weights, self._wanted)
                self._wanted = None
                self._saved.set()
            # The rest of the step of a slower machine: there is nothing to wait for but the time.
            time.sleep(max(0.0, self._step_seconds - (time.monotonic() - began_at)))

    def save(self, path: str) -> dict[str, Any]:
        """Save the weights after the present inner step; return the inner steps and hivemind's epochs so far."""
        self._saved.clear()
        self._wanted = Path(path)
        self._saved.wait()
        return {"steps": self._num_steps, "epochs": self._num_epochs}
