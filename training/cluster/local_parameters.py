"""One rank's shards of a model's parameters, copied from and to the flat vector that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..base.errors import TrainingError
from ..base.parameters import Layout
from .ranks import Ranks, cut_like, cut_of, reshard, synchronize


def _chunk(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """Return one of ``count`` chunks of a range as `torch.chunk` and so `Shard` cut it: the last ones may be empty."""
    step = -(-(stop - start) // count)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def _is_rows(placement: object) -> bool:
    """Return whether a placement cuts a tensor into consecutive rows."""
    from torch.distributed.tensor import Shard  # it takes a while

    return type(placement) is Shard and placement.dim == 0


def _is_plain(placement: object) -> bool:
    """Return whether a rank's local tensor consists of consecutive rows."""
    from torch.distributed.tensor import Replicate

    return _is_rows(placement) or isinstance(placement, Replicate)


def own_part(parameter: Tensor, ranks: Ranks) -> tuple[int, Tensor]:
    """Return the elements of a parameter that this rank copies, (n,), and where in the parameter they begin.

    Every rank calls it at the same time: a parameter that is not cut into rows (tensor parallelism) is redistributed.
    Ranks with the same rows divide them.
    """
    cut = cut_of(parameter)
    if cut is None:
        whole, rank, count = parameter.detach().flatten(), ranks.rank, ranks.num_ranks
        start, stop = len(whole) * rank // count, len(whole) * (rank + 1) // count
        return start, whole[start:stop]
    mesh = cut.device_mesh
    if not all(map(_is_plain, cut.placements)):
        from torch.distributed.tensor import Shard

        cut = cut.redistribute(mesh, [Shard(0)] * mesh.ndim)
    first, last = _own_rows(cut)
    local, start = cut.to_local().detach().flatten(), first * math.prod(cut.shape[1:])
    if len(local) != (last - first) * math.prod(cut.shape[1:]):
        raise TrainingError(f"a parameter of shape {tuple(cut.shape)} is not cut into rows as DTensor cuts it")
    for size, index, placement in zip(mesh.shape, mesh.get_coordinate() or (), cut.placements, strict=False):
        if not _is_rows(placement):
            begin, end = len(local) * index // size, len(local) * (index + 1) // size
            local, start = local[begin:end], start + begin
    return start, local


def _own_rows(cut: Tensor) -> tuple[int, int]:
    """Return the rows of a DTensor's local tensor; none in a process outside its mesh."""
    tensor = cut_of(cut)
    assert tensor is not None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return 0, 0
    rows = 0, tensor.shape[0] if tensor.ndim else 1
    for size, index, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if _is_rows(placement):
            rows = _chunk(*rows, index, size)
    return rows


class LocalParameters:
    """This rank's parts of the parameters; ``ranges`` are their places in the flat vector (n,) fp32 of the layout.

    ``needed`` are the places of what `write` copies: more, where several ranks have the same elements.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], layout: Layout, ranks: Ranks) -> None:
        self._module = module
        self._parameters = list(parameters.values())
        self._layout = layout
        self._ranks = ranks
        starts = [place.start for place in layout.places().values()]
        parts = [own_part(parameter, ranks) for parameter in self._parameters]
        self.ranges = [
            (start + begin, start + begin + len(values))
            for start, (begin, values) in zip(starts, parts, strict=True)
            if len(values)
        ]
        needs = map(_needed, self._parameters)
        self.needed = [(start + first, start + last) for start, (first, last) in zip(starts, needs, strict=True)]
        is_exact = all(parameter.dtype == torch.float32 for parameter in self._parameters)
        # What rounding to the parameters' type has dropped of this rank's parts.
        self._dropped = None if is_exact else [torch.zeros(len(values), dtype=torch.float32) for _, values in parts]

    @torch.no_grad()
    def read(self, flat: Tensor) -> None:
        """Copy this rank's parts to ``flat``, with what rounding has dropped of them, and wait for the other ranks."""
        synchronize(self._parameters)
        for index, (place, values) in enumerate(self._parts()):
            if self._dropped is None:
                flat[place].copy_(values)
            else:  # in one operation: with tensor parallelism, ranks that do not know of each other write the same
                torch.add(self._dropped[index], values.to(self._dropped[index]), out=flat[place])
        self._ranks.meet()

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy ``flat`` to the parameters of this rank, in place, and wait for the other ranks."""
        synchronize(self._parameters)
        for parameter, view in zip(self._parameters, self._layout.views(flat).values(), strict=True):
            _fill(parameter, view)
        reshard(self._module)
        synchronize(self._parameters)
        if self._dropped is not None:
            for dropped, (place, values) in zip(self._dropped, self._parts(), strict=True):
                dropped.copy_(flat[place]).sub_(values.to(dropped))
        self._ranks.meet()

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield this rank's parts with their places in the flat vector."""
        for place, parameter in zip(self._layout.places().values(), self._parameters, strict=True):
            begin, values = own_part(parameter, self._ranks)
            yield slice(place.start + begin, place.start + begin + len(values)), values


def _needed(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the elements of the whole parameter that `_fill` reads."""
    cut = cut_of(parameter)
    if cut is None or not all(map(_is_plain, cut.placements)):
        return 0, math.prod(parameter.shape)
    first, last = _own_rows(cut)
    length = math.prod(cut.shape[1:])
    return first * length, last * length


def _fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Set a parameter's local tensor to its part of ``whole``, on the host."""
    cut = cut_of(parameter)
    if cut is None:
        parameter.copy_(whole)
    elif all(map(_is_plain, cut.placements)):
        first, last = _own_rows(cut)
        cut.to_local().copy_(whole[first:last] if whole.ndim else whole)
    else:
        parameter.copy_(cut_like(cut, whole.to(parameter.device, parameter.dtype)))
