"""A model that each member trains in its own loop (`farandole.training.cluster.external`), in a manifest.

Members bring the model, its inner optimizer and its data themselves. The manifest states what must be equal for an
exchange: the names, shapes and order of the parameters. All other agreements, such as the batch size and the source of
the text, are a *recipe*, known by its hash.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated

import msgspec

from .own_model import Parameters


class ExternalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters that members share."""

    parameters: Annotated[Parameters, msgspec.Meta(min_length=1)]
    """Shapes by name, in the order in which they are sent."""
    recipe: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """SHA-256 of the text of the members' agreements; empty: there are no others."""

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(map(math.prod, self.parameters.values()))


def recipe_hash(recipe: str) -> str:
    """Return the hash by which a manifest names a recipe."""
    return hashlib.sha256(recipe.encode()).hexdigest()
