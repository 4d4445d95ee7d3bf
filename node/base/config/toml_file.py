"""A TOML file with the lines of its settings, which `tomllib` does not keep."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farandole.protocol.wire.errors import ManifestError

from ..system.terminal import without_controls
from .faults import FaultyError, FileFault, Place, shortened

# Ten times as much as the longest file of settings: a larger one is probably a wrong path.
MAX_FILE_BYTES: Final = 256 * 1024
_LINE_WIDTH: Final = 100
_POSITION: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
# The remedy for what `tomllib` reports of the usual mistakes.
_REMEDIES: Final[Mapping[str, str]] = {
    "Invalid value": "a text needs quotes, and true and false are written small",
    "Cannot overwrite a value": "this setting is there already, further up (within [model], a preset is written "
    'preset = "3M")',
    "Expected newline or end of document after a statement": "a line has one setting, and a text has quotes around it",
}
_TOKENS: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|(?P<comment>\#[^\n]*)"
    r"|[\n\[\]{}=,.]"
    r"|[^\s\[\]{}=,.\#]+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A file that has been read, and is valid TOML."""

    path: Path
    text: str
    values: dict[str, Any]

    @contextmanager
    def naming_lines(self) -> Iterator[None]:
        """Turn each `ManifestError` of the block into one with a line of text, ``FILE:LINE: ...``, for each fault."""
        try:
            yield
        except FaultyError as error:
            lines = key_lines(self.text)
            located = sorted(((_line_of(fault, lines), fault.text) for fault in error.faults), key=lambda each: each[0])
            raise ManifestError("\n".join(_told(self.path, line, text) for line, text in located)) from error
        except ManifestError as error:
            raise ManifestError(_told(self.path, 0, str(error))) from error


def read_toml(path: Path) -> TomlFile:
    """Parse a TOML file: a run, a node's settings or a scenario.

    Raises `ManifestError` if it is not there, too long, or not TOML.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ManifestError(_told(path, 0, f"more than {MAX_FILE_BYTES} bytes, too many for a file of settings"))
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
        return TomlFile(path, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(_not_toml(path, text, str(error))) from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ManifestError(_told(path, line, "this is not TOML: a character is not UTF-8")) from error
    except RecursionError as error:
        raise ManifestError(_told(path, 0, "this is not TOML: its values are nested too deeply")) from error


def key_lines(text: str) -> dict[Place, int]:
    """Return the line of each key and each item of a list in a valid TOML text."""
    return _Lines(text).found


def _line_of(fault: FileFault, lines: Mapping[Place, int]) -> int:
    """Return the line of a setting or, if it is not in the file, of its section; 0 for the file as a whole."""
    prefixes = (fault.place[:length] for length in range(len(fault.place), 0, -1))
    return next((lines[place] for place in prefixes if place in lines), 0)


def _told(path: Path, line: int, text: str) -> str:
    """Return a line about a file, which may be a stranger's; ``line`` is 0 for the file as a whole."""
    return without_controls(f"{path}:{line}: {text}" if line else f"{path}: {text}")


def _not_toml(path: Path, text: str, problem: str) -> str:
    """Say in which line `tomllib` found ``problem``, what stands there, and what to do."""
    position = _POSITION.search(problem)
    lines = text.split("\n")
    last = len(text.rstrip("\n").split("\n"))
    number = int(position[1]) if position and position[1] else last
    cause = _POSITION.sub("", problem)
    remedy = f" ({_REMEDIES[cause]})" if cause in _REMEDIES else ""
    column = f", column {position[2]}" if position and position[2] else ""
    shown_line = shortened(lines[number - 1].strip(), _LINE_WIDTH)
    return _told(path, number, f"this is not TOML{column}: {cause}{remedy}; the line is: {shown_line}")


class _Lines:
    """A walk through the tokens of a valid TOML text, which `tomllib` has accepted."""

    def __init__(self, text: str) -> None:
        self.found: dict[Place, int] = {}
        self._tokens = [(match[0], line) for match, line in _numbered(text) if match.lastgroup != "comment"]
        self._at = 0
        self._num_items: dict[Place, int] = {}
        """Of each array of tables: how many ``[[NAME]]`` there were so far."""
        section: Place = ()
        while self._at < len(self._tokens):
            if self._take("\n"):
                continue
            if self._peek() == "[":
                section = self._header()
            else:
                self._pair(section)

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else "\n"

    def _take(self, token: str) -> bool:
        is_there = self._peek() == token and self._at < len(self._tokens)
        self._at += is_there
        return is_there

    def _header(self) -> Place:
        """Read ``[a.b]`` or ``[[a.b]]``; the latter is another item of its list."""
        self._take("[")
        is_item = self._take("[")
        line = self._tokens[self._at][1]
        section: Place = ()
        for key in self._keys():
            section = (*self._last_item(section), key)
            self.found.setdefault(section, line)
        if is_item:
            self._num_items[section] = self._num_items.get(section, 0) + 1
            self.found.setdefault(self._last_item(section), line)
        while self._take("]"):
            pass
        return self._last_item(section)

    def _last_item(self, place: Place) -> Place:
        return (*place, self._num_items[place] - 1) if place in self._num_items else place

    def _keys(self) -> list[str]:
        keys = []
        while True:
            keys.append(_unquoted(self._peek()))
            self._at += 1
            if not self._take("."):
                return keys

    def _pair(self, section: Place) -> None:
        """Read ``a.b = value``."""
        line = self._tokens[self._at][1]
        place = section
        for key in self._keys():
            place = (*place, key)
            self.found.setdefault(place, line)
        self._take("=")
        self._value(place)

    def _value(self, place: Place) -> None:
        if self._take("["):
            index = 0
            while not self._take("]"):
                if self._take("\n"):
                    continue
                if self._take(","):
                    index += 1
                    continue
                self.found[*place, index] = self._tokens[self._at][1]
                self._value((*place, index))
        elif self._take("{"):
            while not self._take("}"):
                if not self._take(","):
                    self._pair(place)
        else:
            while self._peek() not in ("\n", ",", "]", "}"):
                self._at += 1


def _numbered(text: str) -> Iterator[tuple[re.Match[str], int]]:
    line, begin = 1, 0
    for match in _TOKENS.finditer(text):
        line += text.count("\n", begin, match.start())
        begin = match.start()
        yield match, line


def _unquoted(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0"))) if key[0] in "\"'" else key
