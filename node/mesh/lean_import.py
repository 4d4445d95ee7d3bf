"""Imports single modules of a package whose ``__init__`` files import everything.

From libp2p a node uses Noise, peer ids and messages. Python runs a package before any module of it, and libp2p's
packages load QUIC, TLS certificates, HTTP and DNS clients: 0.3 s of a processor at each start, and 26 MB. So a package
does not run when it is imported, but when a name that it does not have yet is looked up in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def import_lean(package: str) -> None:
    """Run ``package`` and its subpackages only when a name is looked up in them. Call it once."""
    sys.meta_path.insert(0, _Finder(package))


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and spec.submodule_search_locations is not None:
            spec.loader = _LazyLoader(spec.loader)
        return spec


class _LazyLoader(Loader):
    """`importlib.util.LazyLoader` cannot be used: to find a module, Python asks its package for ``__path__``."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def run(name: str) -> object:
            """Look up a name that the module lacks; Python calls this (PEP 562)."""
            if not name.startswith("__") and module.__dict__.pop("__getattr__", None) is not None:
                self._loader.exec_module(module)
                return getattr(module, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)

        module.__dict__["__getattr__"] = run
