"""One's own module in a manifest: the function that makes it, its settings, and the resulting parameters.

A manifest names a function and holds no code. A node calls the function only if its owner has installed and allowed it
(`farandole.training.model.own_function`). The parameters are listed here, so that a node without the code can still
count, fetch, check and merge weights, and so that a node whose code makes other parameters is detected before it
trains.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

# PyTorch's name of a parameter within its module; and shapes of eight numbers at most.
_ParameterName = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[A-Za-z0-9_.-]+\Z")]
_Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=2**40)], ...], msgspec.Meta(max_length=8)]
Parameters = dict[_ParameterName, _Shape]
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


class OwnModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module made by a function: whole, or of sections (`farandole.training.model.own_model.SectionedModel`)."""

    function: FunctionName
    """``package.module:function``, as its owner allows it."""
    ends: Annotated[Parameters, msgspec.Meta(min_length=1)]
    """Shapes of both ends' parameters by their names there; of all parameters, where there are no sections."""
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


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of elements of all shapes together."""
    return sum(map(math.prod, shapes.values()))


# A model that each member trains in its own loop (`farandole.training.cluster.external`), in a manifest.
#
# Members bring the model, its inner optimizer and its data themselves. The manifest states what must be equal for an
# exchange: the names, shapes and order of the parameters. All other agreements, such as the batch size and the source
# of the text, are a *recipe*, known by its hash.


class ExternalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters that members share."""

    parameters: Annotated[Parameters, msgspec.Meta(min_length=1)]
    """Shapes by name, in the order in which they are sent."""
    recipe: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """SHA-256 of the text of the members' agreements; empty: there are no others."""

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return count(self.parameters)


def recipe_hash(recipe: str) -> str:
    """Return the hash by which a manifest names a recipe."""
    return hashlib.sha256(recipe.encode()).hexdigest()
