from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from farandole.node.base.config.file import SETTINGS, config_text, read_config
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
