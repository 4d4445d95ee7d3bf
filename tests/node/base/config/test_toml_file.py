from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.config.faults import FaultyError, FileFault, Place, shown
from farandole.node.base.config.toml_file import key_lines, read_toml
from farandole.protocol.wire.errors import ManifestError

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


def test_no_more_of_a_file_is_read_than_a_file_of_settings_may_have(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk, and more memory than any machine has
    with pytest.raises(ManifestError, match=r"huge\.toml: more than 262144 bytes, too many for a file of settings"):
        read_toml(path)


@pytest.mark.parametrize("text", ["a = \x1b[2J", 'a = "\x9b2J\u202e"'])
def test_faults_of_a_strangers_file_do_not_control_the_terminal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ManifestError) as caught:
        read_and_refuse(path)
    assert str(caught.value).isprintable()
    assert "2J" in str(caught.value)


def read_and_refuse(path: Path) -> None:
    """Read a file, and report each of its values as a fault."""
    file = read_toml(path)
    with file.naming_lines():
        raise FaultyError(FileFault((name,), f"{name} is wrong: {shown(value)}") for name, value in file.values.items())


def test_a_long_value_is_cut_at_a_width_even_if_it_is_one_word(tmp_path: Path) -> None:
    assert shown("x" * 200) == '"' + "x" * 96 + "..."
    assert shown(["a b"] * 50).startswith('["a b", "a b", ')
    assert len(shown(["a b"] * 50)) == 100
    assert shown("two  blanks") == '"two  blanks"'
    path = tmp_path / "run.toml"
    path.write_text("  key = " + "x" * 200)
    with pytest.raises(ManifestError, match=r"the line is: key = x{91}\.\.\.$"):
        read_toml(path)
