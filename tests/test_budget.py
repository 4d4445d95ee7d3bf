"""The budget: what a reader must hold stays within `[tool.farandole.budget]` of pyproject.toml.

A feature that needs room makes room: take something away, rather than raise a number.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from . import budget

BUDGET: dict[str, Any] = tomllib.loads((budget.ROOT / "pyproject.toml").read_text())["tool"]["farandole"]["budget"]
REFERENCE = (budget.ROOT / "docs" / "reference.md").read_text()
SETTING = re.compile(r"^\| `", re.MULTILINE)


@pytest.mark.parametrize("layer", ["product", "testnet", "tests"])
def test_lines(layer: str) -> None:
    layers = budget.PRODUCT if layer == "product" else (layer,)
    assert sum(map(budget.num_lines, layers)) <= BUDGET["lines"][layer]


def test_files() -> None:
    assert sum(len(budget.files(layer)) for layer in budget.SOURCES) <= BUDGET["files"]
    assert budget.crowded_folders(BUDGET["modules_of_a_folder"]) == {}


def test_files_import_each_other_one_way() -> None:
    assert budget.circle() == []


def test_classes() -> None:
    assert sum(map(budget.num_classes, budget.SOURCES)) <= BUDGET["classes"]


@pytest.mark.parametrize("layer", ["node", "protocol", "training", "testnet"])
def test_functions_called_once(layer: str) -> None:
    """Such a function is often a paragraph of its caller."""
    assert budget.share_called_once(layer) <= BUDGET["percent_called_once"][layer]


@pytest.mark.parametrize("layer", ["node", "protocol", "training", "testnet"])
def test_callbacks(layer: str) -> None:
    assert budget.num_callbacks(layer) <= BUDGET["callbacks"][layer]


def test_objects_are_narrow() -> None:
    assert budget.wide_objects(BUDGET["attributes"]) == {}
    assert budget.long_constructors(BUDGET["parameters_of_a_constructor"]) == {}
    assert budget.wide_values(BUDGET["fields"]).keys() <= set(BUDGET["wide_values"])


def test_settings_and_options() -> None:
    """The reference has a row for each; another test compares it with the code."""
    of_a_node = REFERENCE.partition("\n## Settings\n")[2].partition("\n## ")[0]
    of_a_run = REFERENCE.partition("\n## Settings of a run\n")[2].partition("\n## ")[0]
    assert len(SETTING.findall(of_a_node)) <= BUDGET["settings"]["node"]
    assert len(SETTING.findall(of_a_run)) <= BUDGET["settings"]["run"]
    assert REFERENCE.count("\n- `--") <= BUDGET["options"]
    assert REFERENCE.count("\n## farandole ") <= BUDGET["commands"]


def test_wire_protocols() -> None:
    assert len(budget.protocols()) <= BUDGET["wire_protocols"]


def test_pages() -> None:
    root = budget.ROOT
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    assert budget.num_words(*pages) <= BUDGET["words"]["pages"]
    assert budget.num_words(root / "README.md") <= BUDGET["words"]["README"]
    assert (root / "BENCHMARKS.md").read_text().count("\n") <= BUDGET["lines_of_benchmarks"]
