"""The command that adds an extra's packages to this installation."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from farandole.training.base.errors import how_to_add

STATED = [
    "torch>=2.4",
    'datasets>=4; extra == "data"',
    "transformers>=5,<6; extra == 'hf'",
]


def test_the_command_names_this_python_and_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: STATED)
    assert how_to_add("data") == f"{sys.executable} -m pip install 'datasets>=4'"
    assert how_to_add("hf") == f"{sys.executable} -m pip install 'transformers>=5,<6'"


def test_an_environment_without_pip_is_uvs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: STATED)
    monkeypatch.setattr("farandole.training.base.errors.find_spec", lambda name: None)
    assert how_to_add("data") == f"uv pip install --python {sys.executable} 'datasets>=4'"
