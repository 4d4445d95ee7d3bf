"""The processes of `torch.distributed` that train one model together, as one member of a run.

However the model is cut (FSDP2's `fully_shard`, tensor parallelism, both, or not at all, with the same parameters in
each process), a member contributes whole parameters in the run's order. So any sharding averages with any other.

Rank 0 leads: its engine and its node decide, and the node has the identity. It gathers the whole parameters in the
host's memory (`farandole.training.cluster.external.UserParameters`), ends the round as one process would, and gives
each rank its part of the result. After each step of the optimizer every rank asks what to do next. An order reaches all
of them between the same two steps:

    BEGIN    the names of the parameters follow
    READ     make the parameters, or their momenta, whole for rank 0, one after another
    WRITE    take the parameters, or their momenta, from rank 0, one after another
    MEASURE  all compute the held-out loss
    STEP     go on with the loop, until after the next step
    OVER     no more orders will come; `FAILED`: nor can the loop go on

Orders travel over gloo, and parameters over whatever the user's process group is of.
"""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from ..base.errors import TrainingError
from ..inner.optimizer import matrices_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# An order may be waited for as long as a member rests. A process that dies closes its connections, which ends the wait.
MAX_REST: Final = timedelta(days=365)
# Numbers of one order, each exact in fp64.
MAX_NUMBERS: Final = 2
# The number of `Order.READ` and `Order.WRITE` where they are of momenta.
MOMENTA: Final = 1.0
Given = TypeVar("Given")
# What `torch.compile` puts in front of the names of the module that it wraps.
_COMPILED: Final = "_orig_mod."


class Order(enum.IntEnum):
    """An order of rank 0 to the other ranks."""

    BEGIN = 0
    READ = 1
    WRITE = 2
    MEASURE = 3
    STEP = 4
    OVER = 5
    FAILED = 6


class Ranks:
    """The group of all ranks, created by `open_ranks`. Without a group this process is the only rank."""

    def __init__(self, group: Any = None) -> None:
        """``group``: a gloo process group for orders; not every torch build has a type for it."""
        self._group = group

    @property
    def are_many(self) -> bool:
        """Return whether there are other ranks."""
        return self._group is not None

    @property
    def is_leader(self) -> bool:
        """Return whether this is rank 0."""
        return self._group is None or distributed.get_rank() == 0

    def tell(self, order: Order, *numbers: float) -> None:
        """Send an order with up to `MAX_NUMBERS` numbers to the other ranks, as rank 0.

        Raises `RuntimeError` if one of them is gone.
        """
        if self._group is not None:
            told = [float(order), *numbers, *[0.0] * (MAX_NUMBERS - len(numbers))]
            distributed.broadcast(torch.tensor(told, dtype=torch.float64), 0, group=self._group)

    def hear(self) -> tuple[Order, list[float]]:
        """Wait for the next order and return it with its numbers. Raises `RuntimeError` if rank 0 is gone."""
        told = torch.empty(1 + MAX_NUMBERS, dtype=torch.float64)
        distributed.broadcast(told, 0, group=self._group)
        order, *numbers = told.tolist()
        return Order(int(order)), numbers

    def of_leader(self, own: Given) -> Given:
        """Return what rank 0 gives; every rank calls it at the same time."""
        if self._group is None:
            return own
        shared: list[Any] = [own]
        distributed.broadcast_object_list(shared, 0, group=self._group)
        given: Given = shared[0]
        return given

    def begin(self, names: Sequence[str]) -> None:
        """Send the names of the parameters that `Order.READ` and `Order.WRITE` refer to, as rank 0."""
        self.tell(Order.BEGIN)
        self.of_leader(list(names))

    def set_parameter(self, parameter: Tensor, whole: Tensor | None = None) -> None:
        """Set a parameter or momentum, or this rank's part, to what rank 0 gives; every rank calls it at the same time.

        ``whole``: rank 0's, of the parameter's shape, dtype and device.
        """
        if whole is None:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if self._group is not None:
            group = self._group if whole.device.type == "cpu" else None
            distributed.broadcast(whole.flatten().view(torch.uint8), 0, group=group)
        if (cut := cut_of(parameter)) is not None:  # each rank takes its part of what every rank has whole
            from torch.distributed.tensor import DTensor, Replicate

            mesh = cut.device_mesh
            everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            whole = everywhere.redistribute(mesh, cut.placements)
        parameter.copy_(whole)


ALONE: Final = Ranks()
"""One process."""


def open_ranks() -> Ranks:
    """Return the ranks of `torch.distributed`, or `ALONE`; every rank must call it."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return ALONE
    if distributed.get_rank() == 0 and restarts_meet_the_dead(os.environ):
        warnings.warn(
            "torchrun will start the ranks again when one is lost, and they will look for each other where the lost "
            "ones were: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun",
            stacklevel=3,
        )
    return Ranks(distributed.new_group(backend="gloo", timeout=MAX_REST))


def restarts_meet_the_dead(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun may restart ranks that then read the addresses of their predecessors.

    torchrun keeps one store for all starts, without a prefix for each (torch 2.13, `rendezvous._create_c10d_store`).
    The new ranks connect to ports without a listener ("Gloo connectFullMesh failed"), or wait for ever.
    """
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shares_store and int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def reshard(module: nn.Module) -> None:
    """Reshard the parameters that FSDP2 keeps whole after a forward pass without a backward pass.

    Until then the module has the whole parameters, and the next forward pass uses them even if the shards were changed.
    """
    if distributed.is_available() and distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule  # it takes a while

        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def parameters_of(module: nn.Module, *, with_frozen: bool = False) -> dict[str, nn.Parameter]:
    """The parameters that members share, by name: shared ones once, frozen ones if asked for, none without elements.

    A module in `DistributedDataParallel`, or one that `torch.compile` has wrapped, has the names of the one inside.
    Raises `TrainingError` if it is no module, or its parameters have no shapes yet.
    """
    if not isinstance(module, nn.Module):
        raise TrainingError(f"a {type(module).__name__} is no torch.nn.Module")
    reshard(module)
    while isinstance(inside := getattr(module, "_orig_mod", module), nn.parallel.DistributedDataParallel):
        module = inside.module
    found = {name.replace(_COMPILED, ""): parameter for name, parameter in module.named_parameters()}
    if lazy := [name for name, parameter in found.items() if is_lazy(parameter)]:
        raise TrainingError(f"parameter {lazy[0]} has no shape yet: call the lazy module once, with a batch")
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.numel() and (with_frozen or parameter.requires_grad)
    }


def matrices_in(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return those of a run's ``parameters``, by name, whose momenta travel: the matrices that Muon steps."""
    by_muon = matrices_of(module)
    found = {id(parameter) for name, parameter in module.named_parameters() if name in by_muon}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) in found}


def momenta_of(matrices: Collection[nn.Parameter], optimizers: Collection[Optimizer]) -> list[Tensor]:
    """Return the momenta of matrices as they are, to be changed in place; zeros where a matrix has none yet.

    ``optimizers``: those that have taken steps. Raises `TrainingError` if they keep none.
    """
    states = [[of.state[each] for of in optimizers if each in of.state] for each in matrices]
    kept = [next((state["momentum_buffer"] for state in each if "momentum_buffer" in state), None) for each in states]
    if optimizers and all(momentum is None for momentum in kept):
        names = ", ".join(sorted(type(each).__name__ for each in optimizers))
        raise TrainingError(
            f"this run averages Muon's momentum, and {names} keeps none: step matrices with torch.optim.Muon, or with "
            "another optimizer that keeps a momentum_buffer"
        )
    return [torch.zeros_like(each) if own is None else own for each, own in zip(matrices, kept, strict=True)]


def whole_of(parameter: Tensor) -> Tensor:
    """A parameter with the parts that other ranks have; every rank asks for it at the same time."""
    cut = cut_of(parameter)
    return parameter if cut is None else cut.full_tensor()


def cut_of(parameter: Tensor) -> DTensor | None:
    """The parameter, if ranks have parts of it."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed.tensor import DTensor  # it takes a while

    return parameter if isinstance(parameter, DTensor) else None


def synchronize(parameters: Iterable[Tensor]) -> None:
    """Wait for what is queued on their GPUs."""
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.synchronize(device)


class Follower:
    """Any rank except rank 0. It obeys orders between two steps."""

    def __init__(
        self,
        ranks: Ranks,
        module: nn.Module,
        evaluate: Callable[[], object] | None,
        optimizers: Collection[Optimizer] = (),
    ) -> None:
        """``optimizers``: as in `momenta_of`."""
        self.round = 0
        self.tokens = 0
        self.is_over = False
        self._ranks = ranks
        self._module = module
        self._evaluate = evaluate
        self._optimizers = optimizers
        self._parameters: dict[str, nn.Parameter] = {}

    def begin(self) -> None:
        """Obey until rank 0 lets the loop begin."""
        self.step_taken()

    def step_taken(self) -> None:
        """Obey until the next step may be taken. Raises `TrainingError` if rank 0 has failed."""
        self._obey(Order.STEP)

    def end(self, *, has_failed: bool = False) -> None:
        """Obey until rank 0 has ended; if the loop has failed here, others find out when this process ends."""
        if not has_failed:
            self._obey(Order.OVER)

    def report(self, loss: float) -> None:
        """Rank 0's losses are reported."""

    def _obey(self, until: Order) -> None:
        while not self.is_over:
            order, numbers = self._ranks.hear()
            match order:
                case Order.BEGIN:
                    found = parameters_of(self._module, with_frozen=True)
                    names = self._ranks.of_leader(list[str]())
                    if missing := [name for name in names if name not in found]:
                        raise TrainingError(f"the model of this rank lacks {missing[0]}, which that of rank 0 has")
                    self._parameters = {name: found[name] for name in names}
                case Order.READ | Order.WRITE:
                    tensors: list[Tensor] = [*self._parameters.values()]
                    if numbers[0]:
                        tensors = momenta_of(matrices_in(self._module, self._parameters).values(), self._optimizers)
                    with torch.no_grad():
                        synchronize(tensors)
                        for tensor in tensors:
                            if order is Order.READ:
                                whole_of(tensor)
                            else:
                                self._ranks.set_parameter(tensor)
                        if order is Order.WRITE:
                            reshard(self._module)
                            synchronize(tensors)
                case Order.MEASURE:
                    if self._evaluate is None:
                        raise TrainingError("evaluate= is to be given to every rank, or to none")
                    self._evaluate()
                case Order.STEP:
                    self.round, self.tokens = map(int, numbers)
                case Order.OVER:
                    self.is_over = True
                case Order.FAILED:
                    self.is_over = True
                    raise TrainingError("rank 0 has failed, and says why")
            if order is until:
                return
