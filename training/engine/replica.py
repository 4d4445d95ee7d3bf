"""One replica: a module in training, the whole model or a stage of it, with everything except its batches.

Its inner steps are taken on one flat vector (`farandole.training.inner.optimizer`): gradient and means are flat fp32
vectors as well. These four lie on the device that trains; all that a round's end needs lies there too, or in the host's
memory, where a GPU must have room for a larger model. A lean replica has these four in bf16
(`farandole.training.inner.lean`), and a round's end on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from farandole.protocol.run.manifest import Manifest

from ..base.device import Device
from ..base.parameters import flatten_, layout_of
from ..inner.lean import LeanOptimizer, Rounding, flatten_lean_
from ..inner.optimizer import InnerOptimizer
from ..outer.contribution import Exam, Measure
from ..outer.momentum import Momentum
from ..outer.outer_state import DeviceWeights, FastWeights
from ..outer.round_end import RoundEnd
from .snapshot import Checkpoint


class Replica:
    """A module, its inner optimizer, the end of its rounds, and its checkpoint.

    What computes its gradient is another matter: `farandole.training.engine.learner` where the module is the whole
    model, `farandole.training.engine.stage_worker` where it is a stage. The same calls give the same bits in processes
    that have called `farandole.training.base.determinism.make_deterministic`, on machines of one class.
    """

    def __init__(
        self,
        module: nn.Module,
        manifest: Manifest,
        *,
        run_id: bytes,
        device: Device,
        averages_on_host: bool = False,
        lean_author: bytes | None = None,
        measure: Measure | None = None,
        exam: Exam | None = None,
    ) -> None:
        """``averages_on_host``: all that a round's end needs lies in the host's memory; at a CPU it does anyhow.

        ``lean_author``: the author of a lean replica, which seeds its rounding; None: the replica trains in fp32.
        ``measure``, ``exam``: see `RoundEnd`.
        """
        layout = layout_of(module, manifest.outer.codec)
        trained: DeviceWeights | None
        make_optimizer: Callable[..., InnerOptimizer]
        if lean_author is None:
            module = module.to(device.torch_device)
            weights, gradient = flatten_(module, layout)
            theta = weights
            if averages_on_host:  # page-locked for CUDA, whose copies are then faster
                theta = torch.empty_like(weights, device="cpu", pin_memory=weights.is_cuda).copy_(weights)
            trained = DeviceWeights(weights) if averages_on_host else None
            make_optimizer = InnerOptimizer
        else:
            rounding = Rounding(run_id, lean_author, device.torch_device)
            theta, weights, gradient = flatten_lean_(module, layout, device.torch_device)
            trained = DeviceWeights(weights, rounding.write_)
            make_optimizer = partial(LeanOptimizer, rounding)
        self.module = module
        """The model, or a stage of it; its parameters are views of a flat vector: the flat fast weights, or a copy."""
        self.gradient = gradient
        """The sum of gradients of the inner step under way, (n,), of the dtype of the weights. Backward passes add to
        it, so it is zero before them."""
        fast, outer = FastWeights(theta, trained), manifest.outer
        self.optimizer = make_optimizer(manifest.inner, module, layout, weights, gradient)
        momentum = None
        if outer.momentum_codec != "none":
            places, keep = self.optimizer.muon_places, manifest.inner.momentum
            parts = layout.fragments(outer.fragments)
            mean, look_ahead = self.optimizer.mean, self.optimizer.look_ahead
            momentum = Momentum(mean, places, outer.momentum_codec, keep, parts, theta, look_ahead)
        self.round_end = RoundEnd(
            fast, layout, outer, manifest.screening, measure, manifest.rounds.partners, exam, momentum
        )
        if lean_author is not None:
            fast.write()
        self.checkpoint = Checkpoint(self.round_end, run_id, device, self.optimizer)

    @torch.no_grad()
    def inner_step(self, num_tokens: int, divisor: int = 1) -> None:
        """Clip, and take one step, with the gradients that the backward passes summed, over ``divisor``."""
        steps = self.round_end.totals.steps
        self.optimizer.step(steps, divisor)
        self.round_end.count_step(num_tokens, self.optimizer.ramp(steps))
