from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from farandole.node.base.config.toml_file import TomlFile, check, expected, read_toml, shown
from farandole.protocol.wire.errors import ManifestError

TEXT = """\
top = 1 # [no.header]
a.b.c = 3
list = [ # [
  1,
]
[section.deep]
x = 1.5
table = {y = 1}
[[fault]]
kind = "a"
[[fault]]
kind = "b"
"""


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("top", 1),
        ("a.b.c", 2),
        ("a.b", 2),
        ("list[0]", 3),
        ("section", 6),
        ("section.deep.x", 7),
        ("section.deep.table.y", 8),
        ("section.deep.missing", 6),
        ("fault[0].kind", 10),
        ("fault[1]", 11),
        ("fault[1].kind", 12),
    ],
)
def test_a_setting_is_named_with_its_line_or_that_of_its_section(setting: str, line: int) -> None:
    with pytest.raises(ManifestError) as caught, TomlFile(Path("a.toml"), TEXT, {}).naming_lines():
        raise ManifestError(f"{setting} is wrong")
    assert str(caught.value) == f"a.toml:{line}: {setting} is wrong"


def test_each_problem_has_its_line_and_they_are_in_order() -> None:
    with pytest.raises(ManifestError) as caught, TomlFile(Path("a.toml"), TEXT, {}).naming_lines():
        raise ManifestError("list is long", "top is low", "the whole is bad")
    assert str(caught.value).splitlines() == [
        "a.toml: the whole is bad",
        "a.toml:1: top is low",
        "a.toml:3: list is long",
    ]


class Circle(msgspec.Struct, tag="circle", tag_field="kind", forbid_unknown_fields=True):
    radius: Annotated[float, msgspec.Meta(gt=0)]


class Square(msgspec.Struct, tag="square", tag_field="kind", forbid_unknown_fields=True):
    side: int = 1


class Drawing(msgspec.Struct, forbid_unknown_fields=True):
    shape: Circle | Square
    colours: tuple[Literal["red", "blue"], ...] = ()
    size: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "shape is missing: expected a section"),
        ({"shape": {}}, "shape.kind is missing: expected one of circle, square"),
        ({"shape": {"kind": "sqare"}}, 'shape.kind: expected one of circle, square, got "sqare"; did you mean square?'),
        ({"shape": {"kind": "circle", "radius": 0}}, "shape.radius: expected a finite number, more than 0, got 0"),
        ({"shape": {"kind": "circle", "radus": 0}}, "shape.radus is no setting; did you mean radius?"),
        ({"shape": {"kind": "square"}, "colours": ["red", 3]}, "colours[1]: expected one of red, blue, got 3"),
        ({"shape": {"kind": "square"}, "size": 10}, "size: expected a whole number, 1 to 9, got 10"),
        ({"qwertz": {}}, "qwertz is no section; the file may have shape, colours, size"),
        ({"shape": 3}, "shape: expected a section, got 3"),
    ],
)
def test_a_fault_is_named_with_what_would_be_right(value: object, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        check(value, Drawing)
    assert str(caught.value) == words


def test_what_is_right_is_no_fault() -> None:
    check({"shape": {"kind": "square"}, "colours": ["red"], "size": 1}, Drawing)
    assert expected(Annotated[str, msgspec.Meta(max_length=3)]) == "a text in quotes, at most 3 long"


def test_no_more_of_a_file_is_read_than_a_file_of_settings_may_have(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk, and more memory than any machine has
    with pytest.raises(ManifestError, match=r"huge\.toml: more than 262144 bytes, too many for a file of settings"):
        read_toml(path)


def test_faults_of_a_strangers_file_do_not_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('a = "\x9b2J\u202e"')
    file = read_toml(path)
    with pytest.raises(ManifestError) as caught, file.naming_lines():
        raise ManifestError(f"a is wrong: {shown(file.values['a'])}")
    assert str(caught.value).isprintable()
    assert "2J" in str(caught.value)


def test_a_long_value_is_cut_at_a_width_even_if_it_is_one_word() -> None:
    assert shown("x" * 200) == '"' + "x" * 96 + "..."
    assert shown(["a b"] * 50).startswith('["a b", "a b", ')
    assert len(shown(["a b"] * 50)) == 100
    assert shown("two  blanks") == '"two  blanks"'
