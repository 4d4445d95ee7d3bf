"""A TOML file of settings: read, and compared with the struct that describes it.

msgspec decides what is valid, and names the first fault in its own words. `check` says it in words for people: the name
of the setting, what was found, and what is expected. `TomlFile.named` adds the file.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from farandole.protocol.wire.errors import ManifestError

from ..system.terminal import without_controls

# Ten times as much as the longest file of settings: a larger one is probably a wrong path.
MAX_FILE_BYTES: Final = 256 * 1024
# A value is shown to be recognised; a long one would hide the rest of the sentence.
_SHOWN_WIDTH: Final = 100
_NOUNS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text in quotes",
    Path: "a path in quotes",
}
# An error of msgspec: what is wrong, and the way to it.
_TOLD: Final = re.compile(r"(.*?)(?: - at `\$([^`]*)`)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A file that has been read, and is valid TOML."""

    path: Path
    values: dict[str, Any]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add ``FILE:`` to each problem of a `ManifestError` of the block; each begins with its setting."""
        try:
            yield
        except ManifestError as error:
            raise ManifestError("\n".join(_told(self.path, problem) for problem in map(str, error.args))) from error


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
        raise ManifestError(_told(path, f"more than {MAX_FILE_BYTES} bytes, too many for a file of settings"))
    try:
        return TomlFile(path, tomllib.loads(raw.decode("utf-8").replace("\r\n", "\n")))
    except tomllib.TOMLDecodeError as error:
        words = f"this is not TOML: {error}. A text needs quotes, true and false are lower-case, a line has one setting"
        raise ManifestError(_told(path, words)) from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ManifestError(_told(path, f"this is not TOML: a character in line {line} is not UTF-8")) from error
    except RecursionError as error:
        raise ManifestError(_told(path, "this is not TOML: its values are nested too deeply")) from error


def _told(path: Path, text: str) -> str:
    """Return a line about a file, which may be a stranger's."""
    return without_controls(f"{path}: {text}")


def check(value: object, kind: Any, name: str = "", *, shortcuts: Mapping[str, Collection[str]] | None = None) -> None:
    """Raise `ManifestError` unless ``value``, parsed from a file, is a ``kind``: a msgspec struct or a field's type.

    ``name``: the setting that has the value. ``shortcuts``: section -> settings that become others before the struct is
    made; suggested for misspelt ones.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ValueError) else None
        told = _TOLD.fullmatch(str(error))
        assert told is not None, "it matches any text"
        for key in re.findall(r"\w+", (told[2] or "").split("[...]")[0]):  # no further than into a free table
            kind, value = _part(kind, value, key)
            name = f"{name}[{key}]" if key.isdigit() else f"{name}.{key}".removeprefix(".")
        if cause is not None:
            raise ManifestError(*(f"{name}: {each}" if name else str(each) for each in cause.args)) from error
        raise ManifestError(_fault(told[1], value, kind, name, shortcuts or {})) from error


def _fault(told: str, value: Any, kind: Any, name: str, shortcuts: Mapping[str, Collection[str]]) -> str:
    """Say in words what msgspec told about the value of a setting."""
    if missing := re.fullmatch("Object missing required field `(.*)`", told):
        due = expected(_part(kind, value, missing[1])[0])
        return f"{name}.{missing[1]} is missing: expected {due}".removeprefix(".")
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", told, re.DOTALL):
        key = unknown[1]
        known = [*_fields(_struct_of(kind, value)), *shortcuts.get(name, ())]
        near = did_you_mean(key, known)
        where = f"[{name}]" if name else "the file"
        hint = f"did you mean {near}?" if near else f"{where} may have {', '.join(known)}"
        noun = "section" if isinstance(value[key], Mapping) else "setting"
        return f"{name}.{key} is no {noun}; {hint}".removeprefix(".")
    choices = [str(choice) for part in members_of(kind) if get_origin(part) is Literal for choice in get_args(part)]
    near = did_you_mean(value, choices) if isinstance(value, str) else None
    return f"{name}: expected {expected(kind)}, got {shown(value)}{f'; did you mean {near}?' if near else ''}"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` probably is; None if it is like none of them."""
    by_form = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.replace("-", "_").lower(), by_form, n=1)
    return by_form[near[0]] if near else None


def shown(value: object) -> str:
    """Show a value from a file. A long one is cut; dots show that there was more."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_WIDTH else f"{text[: _SHOWN_WIDTH - 3]}..."


def expected(kind: Any) -> str:
    """Describe the values of a field's type in words: ``a whole number, 1 to 64``."""
    bare, metas = _split(kind)
    if form := next((meta.description for meta in metas if meta.description), None):
        return form
    parts = members_of(bare)
    if parts != (bare,):
        return " or ".join(dict.fromkeys(map(expected, parts)))
    if get_origin(bare) is Literal:
        choices = ", ".join(map(str, get_args(bare)))
        return f"one of {choices}" if len(get_args(bare)) > 1 else choices
    noun = _NOUNS.get(parts[0]) or ("a section" if _item_kind(bare) is None else "a list in brackets")
    return ", ".join([noun, *(words for meta in metas if (words := _bounds(meta)))])


def _bounds(meta: msgspec.Meta) -> str:
    """Describe the bounds of a number or the length of a text or list."""
    if meta.ge is not None and meta.le is not None:
        return f"{_number(meta.ge)} to {_number(meta.le)}"
    bounds = {"more than": meta.gt, "at least": meta.ge, "at most": meta.le, "less than": meta.lt}
    words = [f"{words} {_number(bound)}" for words, bound in bounds.items() if bound is not None]
    lengths = {"at least": meta.min_length, "at most": meta.max_length}
    words += [f"{words} {length} long" for words, length in lengths.items() if length is not None]
    if meta.pattern:
        words.append(f"of the form {meta.pattern}")
    return " and ".join(words)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _part(kind: Any, value: Any, key: str) -> tuple[Any, Any]:
    """Return the type, and the value if there is one, of an item of a list or of a field of a struct."""
    if key.isdigit():
        return _item_kind(kind), value[int(key)]
    return _fields(_struct_of(kind, value))[key], value.get(key)


def _struct_of(kind: Any, value: Mapping[str, Any]) -> Any:
    """Return the struct that a section is; of several, its tag names the one."""
    structs: list[Any] = [each for each in members_of(kind) if isinstance(each, type(msgspec.Struct))]
    named = [each for each in structs if each.__struct_config__.tag == value.get(each.__struct_config__.tag_field)]
    if len(structs) == 1 or named:
        return (named or structs)[0]
    tags = tuple(each.__struct_config__.tag for each in structs)
    return msgspec.defstruct("_Tagged", [(structs[0].__struct_config__.tag_field, Literal[tags])])


def _fields(struct: Any) -> dict[str, Any]:
    """Return the types of a section's settings by their names in a file, that of its tag first."""
    config = struct.__struct_config__
    tag = {config.tag_field: Literal[config.tag]} if config.tag_field else {}
    return tag | {each.encode_name: each.type for each in msgspec.structs.fields(struct)}


def _split(kind: Any) -> tuple[Any, list[msgspec.Meta]]:
    """Return a type without its annotations, and these."""
    if get_origin(kind) is not Annotated:
        return kind, []
    bare, *metas = get_args(kind)
    return bare, [meta for meta in metas if isinstance(meta, msgspec.Meta)]


def members_of(kind: Any) -> Sequence[Any]:
    """Return the types of a union, without None, which TOML does not have; of another type, the type itself."""
    bare, _ = _split(kind)
    if get_origin(bare) not in (Union, types.UnionType):
        return (bare,)
    return [part for part in get_args(bare) if part is not type(None)]


def _item_kind(kind: Any) -> Any:
    """Return the type of a list's items; None if ``kind`` is no list, and allows none."""
    bares = [_split(part)[0] for part in members_of(kind)]
    return next((get_args(bare)[0] for bare in bares if get_origin(bare) in (tuple, list)), None)
