from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.config.faults import Place
from farandole.node.base.config.toml_file import key_lines

ROOT = Path(__file__).parents[4]
FILES = [*ROOT.glob("examples/**/*.toml"), *ROOT.glob("testnet/**/*.toml"), ROOT / "pyproject.toml"]

TEXT = (
    """\
top = 1 # [no.header]
"quoted key" = "a # b"
a.b.c = """
    + '"""'
    + """
x = 1
[no]
"""
    + '"""'
    + """
list = [ # [
  1,
  {x = 1, y = [2, "]"]},

  [3,
   4],
]
when = 1979-05-27T07:32:00Z
[section.deep]
literal = '''
\\'''
x = 1.5
[[fault]]
kind = "a"
[fault.more]
z = 1
[[fault]]
kind = "b"
"""
)


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*place, key)
        yield from places(part, (*place, key))


def test_each_key_and_each_item_has_its_line() -> None:
    lines = key_lines(TEXT)
    assert set(places(tomllib.loads(TEXT))) <= set(lines)
    expected: dict[Place, int] = {
        ("top",): 1,
        ("quoted key",): 2,
        ("a", "b", "c"): 3,
        ("list",): 7,
        ("list", 0): 8,
        ("list", 1, "y", 1): 9,
        ("list", 2): 11,
        ("list", 2, 1): 12,
        ("when",): 14,
        ("section", "deep"): 15,
        ("section", "deep", "literal"): 16,
        ("section", "deep", "x"): 18,
        ("fault", 0): 19,
        ("fault", 0, "kind"): 20,
        ("fault", 0, "more", "z"): 22,
        ("fault", 1): 23,
        ("fault", 1, "kind"): 24,
    }
    assert {place: lines[place] for place in expected} == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_key_of_this_repository_s_files_is_in_the_line_that_is_named(path: Path) -> None:
    text = path.read_text()
    lines, written = key_lines(text), text.split("\n")
    for place in places(tomllib.loads(text)):
        if isinstance(place[-1], str):
            assert place[-1] in written[lines[place] - 1]
