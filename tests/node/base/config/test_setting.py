from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from farandole.node.base.config.setting import Setting, setting, settings_of
from farandole.node.base.settings import NodeSettings


@dataclass(frozen=True)
class Party:
    cake: str = setting("apple", "What is baked.")
    guests: int | None = setting(None, "How many.", least=1, unset="whoever comes")
    door: int = setting(3, "Which bell.", least=0, most=9)
    volume: float = setting(0.0, "Of the music.", unit="dB", least=0.5, or_zero=True)
    is_loud: bool = setting(True, "For the neighbours.")
    dress: Literal["black", "white"] = setting("black", "What is worn.")
    songs: list[Path] = setting([], "What is sung.")
    host: str = field(default="alice")


def one(name: str) -> Setting:
    return next(each for each in settings_of(Party) if each.name == name)


def test_a_name_makes_flag_and_variable() -> None:
    assert (one("guests").flag, one("guests").variable) == ("--guests", "FARANDOLE_GUESTS")
    assert one("is_loud").flag == "--is-loud/--no-is-loud"


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("cake", ["plum"], [1, None, ["plum"]], "a text in quotes"),
        ("guests", [1, 99], [0, 1.5, "many", True], "a whole number, at least 1"),
        ("door", [0, 9], [-1, 10, 1.0], "a whole number, 0 to 9"),
        ("volume", [0, 0.5, 11], [0.1, -1, float("inf"), float("nan")], "a finite number of dB, at least 0.5, or 0"),
        ("is_loud", [False], [0, "yes"], "true or false"),
        ("dress", ["white"], ["red", 1], "one of black, white"),
        ("songs", [[], ["tango", "valse"]], ["tango", [1]], "a list in brackets"),
    ],
)
def test_a_value_has_a_type_and_bounds(name: str, good: list[object], bad: list[object], words: str) -> None:
    assert all(map(one(name).is_valid, good))
    assert not any(map(one(name).is_valid, bad))
    assert one(name).expected == words


def test_every_setting_of_a_node_can_be_told() -> None:
    for each in settings_of(NodeSettings):
        assert each.expected
        assert each.help.endswith(".")
        assert each.default is not None or each.unset
        assert each.default is None or each.is_allowed(each.default)
