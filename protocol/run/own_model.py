"""One's own module in a manifest: the function that makes it, its settings, and the resulting parameters.

A manifest names a function and holds no code. A node calls the function only if its owner has installed and allowed it
(`farandole.training.model.own_function`). The parameters are listed here, so that a node without the code can still
count, fetch, check and merge weights, and so that a node whose code makes other parameters is detected before it
trains.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Annotated, Final

import msgspec

# PyTorch's name of a parameter within its module; and shapes of eight numbers at most.
_ParameterName = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[A-Za-z0-9_.-]+\Z")]
_Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=2**40)], ...], msgspec.Meta(max_length=8)]
Parameters = dict[_ParameterName, _Shape]
# One of them may stand for as many as a range in braces has numbers (below).
_PackedName = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.-]*(\{[0-9]{1,5}-[0-9]{1,5}\})?[A-Za-z0-9_.-]*\Z"
    ),
]
PackedParameters = dict[_PackedName, _Shape]
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_FUNCTION_FORM = "a function's name in quotes, package.module:function"
FunctionName = Annotated[
    str, msgspec.Meta(max_length=200, pattern=rf"^{_NAME}(\.{_NAME})*:{_NAME}\Z", description=_FUNCTION_FORM)
]
_Word = Annotated[str, msgspec.Meta(max_length=1_000)]
_Scalar = bool | int | float | _Word
_Setting = _Scalar | list[_Scalar]
_SettingName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Settings = dict[_SettingName, _Setting]
# Limit for all layers together: as many as the largest models have, and sizes in bytes stay exact everywhere.
MAX_PARAMETERS = 2**41

# The function that makes adapters of a base model, of which each member has a copy.
ADAPTERS: Final = "farandole.training.model.adapters:adapted"
# Larger than anybody trains.
MAX_RANK: Final = 256


class OwnModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module made by a function: whole, or of sections (`farandole.training.model.own_model.SectionedModel`)."""

    function: FunctionName
    """``package.module:function``, as its owner allows it."""
    ends: Annotated[PackedParameters, msgspec.Meta(min_length=1)]
    """Shapes of both ends' parameters by their names there; of all parameters, where there are no sections. Those of
    equal layers are there once (`packed`)."""
    layer: Parameters = {}
    """Shapes of one layer's parameters by their names there; empty where there are no sections."""
    config: Settings = {}
    """Arguments of the function, in addition to ``context`` and ``vocabulary``."""
    package: Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[A-Za-z0-9._+ -]*\Z")] = ""
    """Name and version of the package that the run's creator used, for people."""

    @property
    def has_sections(self) -> bool:
        """Return whether the module can be cut into stages."""
        return bool(self.layer)

    def num_parameters(self, num_layers: int) -> int:
        """Return the number of parameters with ``num_layers`` layers."""
        return count(self.ends) + num_layers * count(self.layer)


# Layers repeat: the adapters of 80 layers are more than a thousand names. So ``layers.{0-79}.lora_A`` stands for 80;
# names one after another with the same range are a layer, and come layer by layer.

# As many as fitted into a manifest one by one, many times over; a range of a few bytes says no more.
MAX_NAMES: Final = 1 << 16
_RANGE: Final = re.compile(r"(?P<before>.*)\{(?P<first>\d+)-(?P<last>\d+)\}(?P<after>.*)")
_NUMBER: Final = re.compile(r"(?:^|(?<=\.))(?:0|[1-9]\d{0,4})(?=\.)")


def _range_in(name: str) -> tuple[str, range]:
    """Return what is before the range in a name, and its numbers; of another name, the name and a single number."""
    match = _RANGE.fullmatch(name)
    return (match["before"], range(int(match["first"]), int(match["last"]) + 1)) if match else (name, range(1))


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of all shapes together; names may have ranges."""
    return sum(len(_range_in(name)[1]) * math.prod(shape) for name, shape in shapes.items())


def expanded(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes by the names of all parameters, in order, from those that `packed` returned."""
    return {
        form.format(number): shape
        for (_, numbers), layer in groupby(parameters.items(), lambda entry: _range_in(entry[0]))
        for forms in [[(_RANGE.sub(r"\g<before>{}\g<after>", name), shape) for name, shape in layer]]
        for number in numbers
        for form, shape in forms
    }


def problems_of(what: str, parameters: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what is wrong with the names, before anything is `expanded`."""
    counts = [len(_range_in(name)[1]) for name in parameters]
    if sum(counts) > MAX_NAMES:
        yield f"{what} names more than {MAX_NAMES} parameters"
    elif not all(counts) or len(expanded(parameters)) != sum(counts):
        yield f"{what} names a parameter twice, or in a range without numbers"


def packed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name with those of equal layers, one layer after another, once."""
    left, found = list(shapes.items()), dict[str, tuple[int, ...]]()
    before = ("", range(0))
    while left:
        taken, entries = _equal_layers(left)
        if _range_in(next(iter(entries))) == before:  # it would be taken for the same layers
            taken, entries = 1, dict(left[:1])
        before = _range_in(next(iter(entries)))
        found |= entries
        left = left[taken:]
    return found


def _equal_layers(left: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return how many of the first parameters are of equal layers, and one layer; or 1 and the first parameter."""
    for number in _NUMBER.finditer(left[0][0]):
        before, first, count = left[0][0][: number.start()], int(number[0]), 1
        layer = _starting_with(f"{before}{first}.", left)
        while _starting_with(f"{before}{first + count}.", left[len(layer) * count :]) == layer:
            count += 1
        if count > 1:
            numbers = f"{{{first}-{first + count - 1}}}"
            return len(layer) * count, {f"{before}{numbers}.{name}": shape for name, shape in layer}
    return 1, dict(left[:1])


def _starting_with(start: str, left: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the first parameters whose names start so, without that."""
    first = takewhile(lambda entry: entry[0].startswith(start), left)
    return [(name.removeprefix(start), shape) for name, shape in first]


# A model that each member trains in its own loop (`farandole.training.cluster.external`), in a manifest.
#
# Members bring the model, its inner optimizer and its data themselves. The manifest states what must be equal for an
# exchange: the names, shapes and order of the parameters. All other agreements, such as the batch size and the source
# of the text, are a *recipe*, known by its hash.


class ExternalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters that members share. Releases that know no ``base`` read manifests without one."""

    parameters: Annotated[PackedParameters, msgspec.Meta(min_length=1)]
    """Shapes by name, in the order in which they are sent; those of equal layers once (`packed`)."""
    recipe: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """SHA-256 of the text of the members' agreements; empty: there are no others."""
    base: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """Hash of the base model that these parameters adapt (`farandole.training.model.base_folder`); empty: of none."""

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return count(self.parameters)


def recipe_hash(recipe: str) -> str:
    """Return the hash by which a manifest names a recipe."""
    return hashlib.sha256(recipe.encode()).hexdigest()
