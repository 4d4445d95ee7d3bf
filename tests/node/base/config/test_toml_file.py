from __future__ import annotations

from pathlib import Path

import pytest

from farandole.node.base.config.toml_file import read_toml, shown
from farandole.protocol.wire.errors import ManifestError


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
