"""A run's own code, by name: imported only where the node's owner has installed it and allowed it. Imports no torch.

A manifest comes from the network, and an import runs code. So a name is accepted only if the owner gave exactly this
name, and it is looked up among installed packages (the trainer has no current folder on its path).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from importlib import metadata
from typing import Any

from farandole.protocol.run.own_model import ADAPTERS

from ..base.errors import TrainingError

Maker = Callable[[dict[str, Any]], object]


def require_allowed(function: str, package: str, allowed: Collection[str]) -> None:
    """Raises `TrainingError`, which says what to do, unless the function is one that the owner allows."""
    if function == ADAPTERS and folder_for(function, allowed) is None:
        raise TrainingError("this run trains adapters of a base model: name your copy of it with --base FOLDER")
    if not is_allowed(function, allowed):
        raise TrainingError(
            f"this run's model is code of its own: {_described(function, package)}. farandole takes no code from the "
            "network, and runs only what you have installed and allowed. Get that package from whoever invited you, "
            "read it (it runs with your rights), install it into farandole's environment, and join with --allow-model "
            f"{function}"
        )


def is_allowed(function: str, allowed: Collection[str]) -> bool:
    """Return whether the owner allows a function, with or without a folder for it."""
    return function in [each.partition("=")[0] for each in allowed]


def folder_for(function: str, allowed: Collection[str]) -> str | None:
    """Return the folder that the owner gives to a function, as ``package.module:function=FOLDER``; None: none."""
    folders = [folder for each in allowed for name, _, folder in [each.partition("=")] if name == function and folder]
    return folders[0] if folders else None


def load_function(function: str, package: str, allowed: Collection[str]) -> Maker:
    """The function; raises `TrainingError` if it is not allowed, not installed, or not there."""
    require_allowed(function, package, allowed)
    module_name, _, name = function.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TrainingError(f"{module_name} needs the Python package {error.name!r}: install that too") from error
        raise TrainingError(
            f"this run's model is {_described(function, package)}, and there is no module {error.name!r} here: "
            "install the package beside farandole, with the same Python"
        ) from error
    except Exception as error:  # whatever that code does
        raise TrainingError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise TrainingError(
            f"{module_name} has no function {name!r}: is it the version of {_described(function, package)}?"
        )
    maker: Maker = found
    folder = folder_for(function, allowed)
    return maker if folder is None else lambda settings: maker({**settings, "folder": folder})


def package_of(function: str) -> str:
    """Name and version of the installed distribution that a function is from; empty if it is of none."""
    top = function.partition(":")[0].partition(".")[0]
    for distribution in metadata.packages_distributions().get(top, []):
        return f"{distribution} {metadata.version(distribution)}"
    return ""


def _described(function: str, package: str) -> str:
    return f"{function}, of the package {package}" if package else function
