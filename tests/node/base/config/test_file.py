from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from farandole.node.base.config.file import SETTINGS, config_text, read_config
from farandole.node.base.config.setting import Setting, setting, settings_of
from farandole.node.base.config.toml_file import read_toml, shown
from farandole.node.base.settings import NodeSettings
from farandole.protocol.wire.errors import ManifestError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_the_file_for_beginners_changes_nothing(path: Path) -> None:
    path.write_text(config_text())
    assert read_config(path) == {}


def test_the_file_for_beginners_has_every_setting_with_its_default_or_an_example(path: Path) -> None:
    path.write_text(re.sub(r"^#(?! )", "", config_text(), flags=re.MULTILINE))
    assert set(read_config(path)) == {setting.name for setting in SETTINGS if not setting.is_hidden}
    for name, value in tomllib.loads(path.read_text()).items():
        default = getattr(NodeSettings(), name)
        assert value == default or default in (None, [])


def test_the_file_for_beginners_says_meaning_bounds_unit_flag_and_variable() -> None:
    paragraph = next(part for part in config_text().split("\n\n") if "#upload_mbit" in part).replace("\n# ", " ")
    for word in ("Send no faster", "at least 0.5", "Mbit/s", "--upload-mbit", "FARANDOLE_UPLOAD_MBIT", "Default: 0.0"):
        assert word in paragraph


def test_paths_start_at_the_file_s_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    path.write_text('data = ["texts", "/abs", "~/own"]\ntokenizer = "t.json"\n')
    assert read_config(path) == {
        "data": [str(path.parent / "texts"), "/abs", "/home/alice/own"],
        "tokenizer": str(path.parent / "t.json"),
    }


def test_every_fault_is_named_with_what_would_be_right(path: Path) -> None:
    path.write_text(
        'upload_mbits = 5\nslow = "fast"\n\nlog-level = "info"\nthreads = true\nqwertz = 1\nlisten = "x"\n[rounds]\n'
    )
    with pytest.raises(ManifestError) as caught:
        read_config(path)
    assert str(caught.value).splitlines() == [
        f"{path}: upload_mbits is no setting; did you mean upload_mbit?",
        f'{path}: slow: expected a finite number, at least 1, got "fast"',
        f"{path}: log-level is no setting; did you mean log_level?",
        f"{path}: threads: expected a whole number of threads, at least 1, got true",
        f"{path}: qwertz is no setting; `farandole config init` writes a file with all there are",
        f'{path}: listen: expected a list in brackets, got "x"',
        f"{path}: rounds is no setting; did you mean max_rounds?",
    ]


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
    with pytest.raises(ManifestError) as caught, file.named():
        raise ManifestError(f"a is wrong: {shown(file.values['a'])}")
    assert str(caught.value).isprintable()
    assert "2J" in str(caught.value)


def test_a_long_value_is_cut_at_a_width_even_if_it_is_one_word() -> None:
    assert shown("x" * 200) == '"' + "x" * 96 + "..."
    assert shown(["a b"] * 50).startswith('["a b", "a b", ')
    assert len(shown(["a b"] * 50)) == 100
    assert shown("two  blanks") == '"two  blanks"'


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
