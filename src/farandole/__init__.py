"""farandole: train one model together over the internet, from a loop of your own.

    with farandole.NoLoCo(model, optimizer, run="farandole1...") as run:
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

What `__all__` names is the interface, and so is what `farandole.hf` and `farandole.lightning` name; everything else in
this package is private.
Importing it costs next to nothing: PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.node.own_loop.attachment import NodeError
    from farandole.node.own_loop.create import create_run, model_of
    from farandole.node.own_loop.noloco import NoLoCo
    from farandole.node.programs.mesh import Mesh
    from farandole.node.programs.stream import MeshError
    from farandole.protocol.wire.errors import FarandoleError

    __version__: str

__all__ = ["FarandoleError", "Mesh", "MeshError", "NoLoCo", "NodeError", "create_run", "model_of"]

_PLACES = {
    "FarandoleError": "farandole.protocol.wire.errors",
    "Mesh": "farandole.node.programs.mesh",
    "MeshError": "farandole.node.programs.stream",
    "NoLoCo": "farandole.node.own_loop.noloco",
    "NodeError": "farandole.node.own_loop.attachment",
    "create_run": "farandole.node.own_loop.create",
    "model_of": "farandole.node.own_loop.create",
}


if not TYPE_CHECKING:  # a type checker takes any name for one that this returns

    def __getattr__(name: str) -> Any:
        if name in _PLACES:
            return getattr(importlib.import_module(_PLACES[name]), name)
        if name == "__version__":
            return importlib.import_module("farandole.node.base.project").VERSION
        if name in ("hf", "lightning"):  # they need transformers and Lightning
            return importlib.import_module(f"farandole.{name}")
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
