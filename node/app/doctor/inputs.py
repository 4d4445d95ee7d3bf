"""Checks of a node's inputs to a run: text, data sets, code; none of the code is run."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

import msgspec

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.own_model import FunctionName
from farandole.training.base.errors import how_to_add
from farandole.training.model.own_function import package_of

from ...base.requirements import line_shortfall
from ...base.settings import NodeSettings
from .causes import found
from .finding import Finding

_STREAMS_NEED: Final = "datasets"


def check_data(paths: Sequence[Path], streams: Sequence[str] = ()) -> list[Finding]:
    """Check whether files and folders of text can be read, and streams be opened, as far as this machine can know."""
    if paths and streams:
        return [found("data-two-kinds")]
    return [*map(_check_data, paths), *map(_check_stream, streams)] or [found("data-none")]


def _check_data(path: Path) -> Finding:
    try:
        if path.is_dir():
            is_fine = os.access(path, os.R_OK | os.X_OK) and any(names for _, _, names in os.walk(path))
            return found("data-fine" if is_fine else "data-empty", path=path)
        with path.open("rb") as file:
            return found("data-fine" if file.read(1) else "data-empty", path=path)
    except OSError as error:
        return found("data-unreadable", path=path, why=error.strerror)


def _check_stream(name: str) -> Finding:
    from farandole.training.data.streaming import is_data_set  # imports numpy, which the doctor does not need

    if not is_data_set(name):
        return found("data-no-stream", name=name)
    if _spec_of(_STREAMS_NEED) is None:
        return found("data-no-package", name=name, package=_STREAMS_NEED, command=how_to_add("data"))
    return found("data-stream", name=name)


def check_models(functions: Sequence[str]) -> list[Finding]:
    """Check whether the code that the owner allows is installed."""
    return [_check_model(function) for function in functions] or [found("model-none")]


def _check_model(function: str) -> Finding:
    try:
        msgspec.convert(function, FunctionName)
    except msgspec.ValidationError:
        return found("model-no-function", function=function)
    module = function.partition(":")[0]
    if _spec_of(module) is None:
        return found("model-missing", function=function, module=module)
    package = package_of(function)
    return found("model-fine", function=function, package=package or "no package that pip knows")


def _spec_of(module: str) -> ModuleSpec | None:
    """Find the spec that Python would import. `importlib.util.find_spec` would run the code of its parent packages."""
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name, path = (f"{name}.{part}", spec.submodule_search_locations) if spec else (part, None)
        if spec is not None and path is None:  # no package, so nothing is in it
            return None
        found_by = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((each for each in found_by if each is not None), None)
        if spec is None:
            return None
    return spec


def _check_tokenizer(path: Path | None, sha256: str) -> Iterator[Finding]:
    if path is None:
        yield found("run-needs-tokenizer", sha256=sha256)
        return
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        yield found("run-tokenizer-unreadable", path=path, why=error.strerror)
        return
    if digest != sha256:
        yield found("run-tokenizer-other", path=path, digest=digest, sha256=sha256)


def check_needs(manifest: Manifest, settings: NodeSettings) -> Iterator[Finding]:
    """Yield a finding for each input that the run requires of every node and the settings lack."""
    if manifest.data.source == "text" and not (settings.data or settings.stream):
        yield found("run-needs-text")
    if manifest.tokenizer.kind == "tokenizers":
        yield from _check_tokenizer(settings.tokenizer, manifest.tokenizer.sha256)
    own = manifest.model.own
    if own is not None and own.function not in settings.allow_model:
        yield found("run-needs-model", function=own.function, package=own.package or "no package that it names")
    if words := line_shortfall(manifest, settings.upload_mbit, settings.download_mbit):
        yield found("run-needs-line", why=words)
