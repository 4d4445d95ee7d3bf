"""The processes of `torch.distributed` that train one model together, as one member of a run.

However the model is cut (FSDP2's `fully_shard`, tensor parallelism, both, or not at all, with the same parameters in
each process), a member contributes whole parameters in the run's order. So any sharding averages with any other.

Rank 0 leads: its engine and its node decide, and the node has the identity. After each step of the optimizer every rank
asks what to do next. An order reaches all of them between the same two steps:

    BEGIN    the names of the parameters follow
    SHARE    map the memory for the flat vectors that follows
    READ     copy the parameters to the flat vectors
    WRITE    copy the flat vectors to the parameters
    ENCODE   freeze a contribution of a fragment, and begin to encode one's ranges
    DECODE   decode one's ranges of a span of the partner's contribution
    OUTER    take the outer step in one's ranges
    HOSTS    do on each machine what rank 0 does on its own (`farandole.training.outer.share.HostWork`)
    MEASURE  all compute the held-out loss
    STEP     go on with the loop, until after the next step
    OVER     no more orders will come; `FAILED`: nor can the loop go on

The ranks on one machine share flat vectors (`farandole.training.cluster.shared_vectors`), and each machine has its part
of them. Before `SHARE`, `READ` makes the parameters whole one after another. Orders travel over gloo, and parameters
over whatever the user's process group is of.
"""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, distributed, nn

from .hosts import Hosts, find_hosts
from .vector_memory import Mark, sees_mark

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# An order may be waited for as long as a member rests. A process that dies closes its connections, which ends the wait.
MAX_REST: Final = timedelta(days=365)
# Numbers of one order, each exact in fp64.
MAX_NUMBERS: Final = 6
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
    SHARE = 7
    ENCODE = 8
    DECODE = 9
    OUTER = 10
    HOSTS = 11


class Ranks:
    """The group of all ranks, created by `open_ranks`. Without a group this process is the only rank."""

    def __init__(self, group: Any = None) -> None:
        """Create the ranks. ``group``: a gloo process group for orders; not every torch build has a type for it."""
        self._group = group
        self.hosts = Hosts([[0]] if group is None else self._find_hosts(), self.rank, MAX_REST)
        """The machines that they are on."""

    def _find_hosts(self) -> list[list[int]]:
        mark: Mark | None = None

        def show() -> str:
            nonlocal mark
            mark = Mark()
            return mark.told

        try:
            return find_hosts(self.rank, self.gather, show, sees_mark)
        finally:
            if mark is not None:
                mark.close()

    @property
    def are_many(self) -> bool:
        """Return whether there are other ranks."""
        return self._group is not None

    @property
    def is_leader(self) -> bool:
        """Return whether this is rank 0."""
        return self._group is None or distributed.get_rank() == 0

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return 0 if self._group is None else distributed.get_rank()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return 1 if self._group is None else distributed.get_world_size()

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

    def tell_bytes(self, order: Order, data: bytes) -> None:
        """Send an order with data, as rank 0."""
        if self._group is not None:
            self.tell(order, len(data))
            distributed.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)

    def hear_bytes(self, size: float) -> bytes:
        """Receive the data of `tell_bytes`; ``size`` is the order's number."""
        data = torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(data, 0, group=self._group)
        return data.numpy().tobytes()

    def begin(self, names: Sequence[str]) -> None:
        """Send the names of the parameters that `Order.READ` and `Order.WRITE` refer to."""
        self.tell_bytes(Order.BEGIN, "\n".join(names).encode())

    def meet(self, flag: bool = False) -> bool:
        """Wait for all ranks; return whether any of them gives True. Raises `RuntimeError` if one of them is gone."""
        if self._group is None:
            return flag
        flags = torch.tensor([int(flag)])
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self._group)
        return bool(flags.item())

    def gather(self, own: Given) -> list[Given]:
        """Return what each rank gives, in the order of the ranks."""
        if self._group is None:
            return [own]
        gathered: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(gathered, own, group=self._group)
        return gathered


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
    """
    reshard(module)
    while isinstance(inside := getattr(module, "_orig_mod", module), nn.parallel.DistributedDataParallel):
        module = inside.module
    found = {name.replace(_COMPILED, ""): parameter for name, parameter in module.named_parameters()}
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.numel() and (with_frozen or parameter.requires_grad)
    }


def whole_of(parameter: nn.Parameter) -> Tensor:
    """A parameter with the parts that other ranks have; every rank asks for it at the same time."""
    cut = cut_of(parameter)
    return parameter if cut is None else cut.full_tensor()


def cut_of(parameter: Tensor) -> DTensor | None:
    """The parameter, if ranks have parts of it."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed.tensor import DTensor  # it takes a while

    return parameter if isinstance(parameter, DTensor) else None


def cut_like(cut: DTensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has whole."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = cut.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, cut.placements)


def synchronize(parameters: Iterable[nn.Parameter]) -> None:
    """Wait for what is queued on their GPUs."""
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.synchronize(device)
