"""The weights of a Hugging Face folder, as a consolidated checkpoint that a run starts from: continued pre-training.

It supports Llama and GPT-2 as `farandole.node.store.hf_file` knows them. Only safetensors are read: a ``.bin`` is a
pickle, which is code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec

from farandole.protocol.run.cut import shapes_of
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.safetensors import Shape, parse_tensors

from .tensors import ConsolidatedError, Floats, TensorFile, open_tensors

MAX_INDEX_BYTES: Final = 16 * 1024 * 1024
# The files of a model of some hundred billion parameters.
MAX_FILES: Final = 1_024

_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+\.safetensors$", max_length=128)]]


@contextlib.contextmanager
def open_hf_weights(folder: Path, manifest: Manifest) -> Iterator[Callable[[str], Floats]]:
    """Open a function that reads one of the folder's weights by our name, while the block runs.

    Raises `ConsolidatedError` unless the folder has all weights of the manifest's model, in its shapes.
    """
    parse = partial(parse_tensors, is_skipped=_is_buffer)
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(open_tensors(folder / name, parse, "safetensors file of weights"))
            for name in _file_names(folder)
        ]
        places = {name: file for file in files for name in file.shapes}
        found = {name: _find(folder, name, shape, places) for name, shape in shapes_of(manifest.model).items()}
        yield lambda name: found[name][0].read(found[name][1])


def _file_names(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _FILE).exists():
            raise ConsolidatedError(f"{folder} needs its weights as {_FILE}, or as several files with {_INDEX}")
        return [_FILE]
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ConsolidatedError(f"{index} has more than {MAX_INDEX_BYTES} bytes")
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConsolidatedError(f"{index} says not which file has which weights: {error}") from error
    if len(names) > MAX_FILES:
        raise ConsolidatedError(f"{index} names {len(names)} files; at most {MAX_FILES} are read")
    return sorted(names)


def _is_buffer(name: str) -> bool:
    """Return whether a name is no parameter but follows from the configuration: causal masks, rotary frequencies."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _find(folder: Path, name: str, shape: Shape, places: dict[str, TensorFile]) -> tuple[TensorFile, str]:
    # Files of a model without its head leave out the prefix of the whole model's parameter names.
    bare = name.removeprefix("transformer.").removeprefix("model.")
    theirs = name if name in places else bare
    if theirs not in places:
        raise ConsolidatedError(f"{folder} has no weights {name}, which its configuration asks for")
    if (held := places[theirs].shapes[theirs]) != shape:
        raise ConsolidatedError(f"{folder}: {name} has the shape {held}, its configuration makes it {shape}")
    return places[theirs], theirs
