"""Names on pages exist: files, commands and their options. The build of the site checks links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from farandole.node.base.config.file import SETTINGS
from farandole.node.base.errors import Exit

from .markdown import PAGES, ROOT, Block, blocks, code_spans, name_of
from .usage import check, check_farandole, check_name, whole_command

SOURCES = [
    path for folder in ("node", "protocol", "testnet", "tests", "training") for path in (ROOT / folder).rglob("*.py")
]
pages = pytest.mark.parametrize("page", PAGES, ids=name_of)
# Folders of the repository; text before them is not part of a path.
_PATH = re.compile(r"(?:\.ci|docs|examples|grafana|node|protocol|src|testnet|tests|training)/[\w./-]*")
_JOIN = re.compile(r"^(farandole )?join ((farandole1|\S+\.manifest)\S* )?")
# In comments of files for users: "#   farandole join ...".
_IN_A_COMMENT = re.compile(r"^#\s+((?:docker|farandole) .*)$", re.MULTILINE)


@pages
def test_files_are_there(page: Path) -> None:
    assert "](http://" not in page.read_text()
    named = [span for span in code_spans(page.read_text()) if _PATH.fullmatch(span)]
    missing = [span for span in named if not (ROOT / span).exists()]
    assert not missing
    bare = [span for span in code_spans(page.read_text()) if re.fullmatch(r"\w+\.py", span)]
    assert not set(bare) - {path.name for path in SOURCES}


def test_names_within_docstrings_are_there() -> None:
    """A rename that forgets a reference fails here."""
    for path in SOURCES:
        for name in set(re.findall(r"`(farandole(?:\.\w+)+)`", path.read_text())):
            assert _is_defined(name), f"{path}: there is no {name}"


def _is_defined(name: str) -> bool:
    """Return whether such a module exists, or such a name at its top level. Attributes of classes are not checked."""
    place, *parts = ROOT, *name.split(".")[1:]
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").exists():
        place /= f"{parts.pop(0)}.py"
    elif parts:
        place /= "__init__.py"
    if not parts:
        return True
    definition = rf"^(?:async )?(?:def|class) {parts[0]}\b|^{parts[0]}\b *[:=]"
    return place.exists() and re.search(definition, place.read_text(), re.MULTILINE) is not None


@pages
def test_commands_could_be_typed(page: Path) -> None:
    for block in blocks(page.read_text()):
        for command in block.commands:
            check(command.words)


@pages
def test_commands_within_lines_could_be_typed(page: Path) -> None:
    for span in code_spans(page.read_text()):
        _, *arguments = Block("sh", span, 0).commands[0].words if span.startswith("farandole ") else [""]
        if any(word.startswith("-") or "1" in word for word in arguments):
            check_farandole([*arguments])
        elif arguments:  # a command's name alone stands for all its uses
            check_name(arguments)


@pages
def test_settings_within_lines_are_taken(page: Path, tmp_path: Path) -> None:
    """`farandole config show` takes the flags of `join`, and checks their values."""
    for span in code_spans(page.read_text()):
        if flags := settings_in(_JOIN.sub("", span)):
            shown = CliRunner().invoke(whole_command(), ["config", "show", "--home", str(tmp_path), *flags])
            assert shown.exit_code == Exit.OK, f"{span}: {shown.output}"


def settings_in(text: str) -> list[str]:
    """Return the words if all are flags of settings with their values; otherwise none."""
    switches = {name for setting in SETTINGS if setting.kind is bool for name in setting.flag.split("/")}
    valued = {setting.flag for setting in SETTINGS if setting.kind is not bool} - {""}
    words = shlex.split(text) if text.startswith("--") and "<" not in text else []
    rest = iter(words)
    for word in rest:
        if word not in switches and (word not in valued or next(rest, "--").startswith("--")):
            return []
    return words


@pytest.mark.parametrize("name", ["Dockerfile", "examples/run.toml", "examples/llama-3-stages/run.toml"])
def test_commands_in_comments_could_be_typed(name: str) -> None:
    for line in _IN_A_COMMENT.findall((ROOT / name).read_text()):
        check(Block("sh", line, 0).commands[0].words)


@pages
def test_every_page_of_blocks_says_what_they_are(page: Path) -> None:
    languages = {block.language for block in blocks(page.read_text())}
    assert languages <= {"console", "sh", "toml", "python", "diff", "json", "text", "yaml", "ini"}
    known = {"on", "stays", "when", "types", "until", "exit", "not-played", "long", "file"}
    assert not {key for block in blocks(page.read_text()) for key in block.play} - known
