"""What can go wrong in training, by whose fault it is."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Final

from farandole.protocol.wire.errors import FarandoleError


class TrainingError(FarandoleError, ValueError):
    """Base of every error that this package raises on purpose; its message is for people."""


class DataError(TrainingError):
    """This node's text or tokenizer is missing, too small, or not the run's."""


class NoSliceError(TrainingError):
    """No slice of the data is this node's now; there may be one soon."""


class DivergedError(TrainingError):
    """This node's own weights are no longer finite: its learning rate is too high, or its hardware errs."""


class CodecError(TrainingError):
    """A tensor cannot be encoded, or bytes are no encoded tensor: wrong length, or a value that is not finite."""


class CheckpointError(TrainingError):
    """A checkpoint is not one of this run, is damaged, or is hostile; nothing of it was used."""


class UnfitWeightsError(CheckpointError):
    """A peer gave a checkpoint that cannot be used; another's may do."""


class ActivationError(TrainingError):
    """Activations or their gradient are not finite, or not of the size that they must have."""


class OutlierError(ActivationError):
    """Activations or their gradient are unlike what came before (`farandole.training.engine.link_statistics`)."""


# Packages that only some runs need: the extras of pyproject.toml, and how to add one to this installation.

_PACKAGE: Final = "farandole"
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


def how_to_add(extra: str) -> str:
    """Return the command that installs an extra's packages for the Python that runs this, wherever farandole came from.

    An installed program has an environment of its own: ``pip`` alone would install into another.
    """
    try:
        stated = [line.partition(";") for line in metadata.requires(_PACKAGE) or []]
    except metadata.PackageNotFoundError:
        stated = []
    found = [name.strip() for name, _, marker in stated if (its := _EXTRA.search(marker)) and its[1] == extra]
    wanted = found or [f"{_PACKAGE}[{extra}]"]
    has_pip = find_spec("pip") is not None
    installer = f"{sys.executable} -m pip install" if has_pip else f"uv pip install --python {sys.executable}"
    return " ".join([installer, *map(shlex.quote, wanted)])
