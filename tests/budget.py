"""Measures of how much there is to hold in the sources; `tests/test_budget.py` compares them with pyproject.toml.

Only the standard library's parser reads the sources, and none of them is run.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("node", "protocol", "training", "src")
SOURCES = (*PRODUCT, "testnet")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def paths(layer: str) -> list[Path]:
    """Return a layer's files. ``src`` has links to the other layers, which are not followed."""
    folder = ROOT / layer
    return sorted(path for path in folder.rglob("*.py") if path.resolve().is_relative_to(folder))


@cache
def files(layer: str) -> dict[Path, ast.Module]:
    """Return a layer's files, parsed."""
    return {path: ast.parse(path.read_text()) for path in paths(layer)}


def num_lines(layer: str) -> int:
    """Return the lines of a layer's files."""
    return sum(path.read_text().count("\n") for path in paths(layer))


def num_classes(layer: str) -> int:
    """Return the classes of a layer."""
    return sum(isinstance(node, ast.ClassDef) for tree in files(layer).values() for node in ast.walk(tree))


def share_called_once(layer: str) -> float:
    """Return the percentage of a layer's functions that are private and named in one place of their file alone."""
    num_functions = num_once = 0
    for path, tree in files(layer).items():
        names = Counter(re.findall(r"\b_[a-z]\w*\b", path.read_text()))
        for node in ast.walk(tree):
            if isinstance(node, _Function):
                num_functions += 1
                num_once += node.name.startswith("_") and names[node.name] == 2
    return 100 * num_once / max(1, num_functions)


def crowded_folders(most: int) -> dict[str, int]:
    """Return the folders with more modules than ``most``."""
    counts = Counter(path.parent for layer in SOURCES for path in files(layer) if path.name != "__init__.py")
    return {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > most}


@cache
def _classes() -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for layer in SOURCES:
        for tree in files(layer).values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, node)
    return found


def _ancestors(name: str, seen: tuple[str, ...] = ()) -> Iterator[ast.ClassDef]:
    if name in _classes() and name not in seen:
        yield _classes()[name]
        for base in _classes()[name].bases:
            yield from _ancestors(ast.unparse(base).split("[")[0].split(".")[-1], (*seen, name))


def wide_objects(most: int) -> dict[str, int]:
    """Return the classes whose objects store more than ``most`` attributes, those of all ancestors included."""
    widths = {
        name: len({attribute for parent in _ancestors(name) for attribute in _stored(parent)}) for name in _classes()
    }
    return {name: width for name, width in widths.items() if width > most}


def _stored(node: ast.ClassDef) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            yield item.attr


def long_constructors(most: int) -> dict[str, int]:
    """Return the classes whose constructor takes more than ``most`` parameters."""
    found = {}
    for name, node in _classes().items():
        for item in node.body:
            if isinstance(item, _Function) and item.name == "__init__":
                found[name] = len(item.args.posonlyargs + item.args.args + item.args.kwonlyargs) - 1
    return {name: count for name, count in found.items() if count > most}


def fields(node: ast.ClassDef) -> int:
    """Return the fields that the body of a class declares."""
    annotations = (ast.unparse(item.annotation) for item in node.body if isinstance(item, ast.AnnAssign))
    return sum(not each.startswith(("ClassVar", "Final")) for each in annotations)


def wide_values(most: int) -> dict[str, int]:
    """Return the classes that declare more than ``most`` fields, those of all ancestors included."""
    widths = {name: sum(map(fields, _ancestors(name))) for name in _classes()}
    return {name: width for name, width in widths.items() if width > most}


def num_callbacks(layer: str) -> int:
    """Return the fields and parameters of a layer whose type is ``Callable``."""
    annotations = (
        node.annotation
        for tree in files(layer).values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None
    )
    return sum("Callable[" in ast.unparse(annotation) for annotation in annotations)


def protocols() -> set[str]:
    """Return the ids of the wire protocols."""
    ids = re.compile(r'"(/farandole/[a-z-]+(?:/[a-z-]+)*/\d+)"')
    return {name for layer in PRODUCT for path in files(layer) for name in ids.findall(path.read_text())}


def circle() -> list[str]:
    """Return files of which each imports the next and the last the first, imports for type checkers included."""
    modules = {_module(path): (path, tree) for layer in SOURCES for path, tree in files(layer).items()}
    imports = {name: set(_imports(name, path, tree, set(modules))) for name, (path, tree) in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: Path, tree: ast.Module, known: set[str]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            else:
                base = (node.module or "").removeprefix("farandole.").split(".")
            parent = ".".join(filter(None, base))
            for alias in node.names:
                target = f"{parent}.{alias.name}" if f"{parent}.{alias.name}" in known else parent
                if target in known and target != name:
                    yield target


def num_words(*pages: Path) -> int:
    """Return the words of pages."""
    return sum(len(page.read_text().split()) for page in pages)
