"""What a run starts from if not from its seed: a file with another run's weights, of which a stage takes its own.

The run's manifest names the file by its content, and its bytes were proved before they came here. What is looked at
is whether they fit: names, types and shapes, and every value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checkpoint import check_tensor
from .errors import CheckpointError
from .parameters import Layout


def load_start(path: Path, vectors: Mapping[str, Tensor], layout: Layout, optional: Collection[str]) -> set[str]:
    """Copy what the layout has of the file at ``path`` into the flat vectors (n,); returns the vectors that it has.

    Those named in ``optional`` may be missing, wholly, and become zeros then. What else the file has is passed over.
    Raises `CheckpointError`, before anything is changed, if anything is missing or unfit.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            present = {vector for vector in vectors if vector not in optional or f"{vector}/{layout.names[0]}" in names}
            for vector in sorted(present):
                for name, shape in zip(layout.names, layout.shapes, strict=True):
                    if f"{vector}/{name}" not in names:
                        raise CheckpointError(f"{path.name} has no {vector}/{name}: it is of another model")
                    check_tensor(f"{vector}/{name}", file.get_tensor(f"{vector}/{name}"), shape)
            for vector, flat in vectors.items():
                if vector not in present:
                    flat.zero_()
                    continue
                for name, view in layout.views(flat).items():
                    view.copy_(file.get_tensor(f"{vector}/{name}"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from error
    return present
