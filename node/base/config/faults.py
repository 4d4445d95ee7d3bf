"""Faults of a parsed settings file against the struct that describes it: all at once, each with what is allowed there.

msgspec decides what is valid, but reports one fault, in its own words. This module explains its refusal: it goes
through the same types again, and names each setting that is wrong, what was found, and what is expected. Where a
setting is wrong, its relations to others are not reported: they may follow from it.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from farandole.protocol.wire.errors import ManifestError

from .setting import NOUNS

Place = tuple[str | int, ...]
"""The keys, and the indices in lists, that lead to a value."""

# A value is shown to be recognised; a long list would hide the rest of the sentence.
_SHOWN_WIDTH: Final = 100
_MORE: Final = "..."
_SETTING: Final = re.compile(r"\w+(?:\.\w+|\[\d+\])*")


@dataclass(frozen=True, slots=True)
class FileFault:
    """One thing that is wrong in a file."""

    place: Place
    text: str
    """Begins with the name of the setting."""

    def within(self, section: str) -> FileFault:
        """Return the fault as one of a file that has these settings in a section."""
        return FileFault((section, *self.place), f"{section}.{self.text}")


class FaultyError(ManifestError):
    """Settings have faults; the message has all of them."""

    def __init__(self, faults: Iterable[FileFault]) -> None:
        self.faults = tuple(faults)
        super().__init__(*(fault.text for fault in self.faults))


@dataclass(frozen=True, slots=True)
class Context:
    """What a file may have in addition to its struct, and what is known about its faults already."""

    shortcuts: Mapping[Place, Collection[str]] = field(default_factory=dict)
    """Settings of a section that become others before the struct is made; suggested for misspelt ones."""
    forms: Mapping[Place, str] = field(default_factory=dict)
    """What is expected of a setting, in words, where the file allows more than the struct."""
    stand_ins: Mapping[str, object] = field(default_factory=dict)
    """Values in place of wrong or missing ones that have no default, so that relations of the rest can be checked."""
    doubtful: Collection[str] = ()
    """Settings with faults that are reported elsewhere."""
    homes: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Setting -> the sections that have one of this name; "": the part above all sections."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Setting of another file -> where it belongs, in words."""


_NO_CONTEXT: Final = Context()


def faults_of(value: object, kind: Any, context: Context = _NO_CONTEXT, place: Place = ()) -> list[FileFault]:
    """Return all faults of ``value``, parsed from a file, as a ``kind``: a msgspec struct, or the type of a field."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return list(_explained(value, kind, context, place))
    return []


def homes_of(struct: type[msgspec.Struct]) -> dict[str, list[str]]:
    """Return the sections of a file that have a setting of each name (`Context.homes`); ``struct``: the file."""
    homes: dict[str, list[str]] = {}
    for about in msgspec.structs.fields(struct):
        homes.setdefault(about.encode_name, []).append("")
        for part in _members(_split(about.type)[0]):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                for setting in msgspec.structs.fields(part):
                    sections = homes.setdefault(setting.encode_name, [])
                    if about.encode_name not in sections:
                        sections.append(about.encode_name)
    return homes


def faults_in(error: ManifestError) -> list[FileFault]:
    """Return the faults that an error reports; each problem of a plain `ManifestError` begins with its setting."""
    return list(error.faults) if isinstance(error, FaultyError) else [_named(str(text)) for text in error.args]


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` probably is; None if it is like none of them."""
    by_form = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.replace("-", "_").lower(), by_form, n=1)
    return by_form[near[0]] if near else None


def shown(value: object) -> str:
    """Show a value from a file, shortened."""
    return shortened(json.dumps(value, default=str, ensure_ascii=False), _SHOWN_WIDTH)


def shortened(text: str, width: int) -> str:
    """Cut a text at ``width`` characters, wherever its words end; dots show that there was more."""
    return text if len(text) <= width else text[: width - len(_MORE)] + _MORE


def _explained(value: object, kind: Any, context: Context, place: Place) -> Iterator[FileFault]:
    bare, _ = _split(kind)
    structs = [part for part in _members(bare) if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    if structs and isinstance(value, Mapping):
        yield from _of_section(value, structs, context, place)
        return
    items: list[FileFault] = []
    if (item := _item_kind(bare)) is not None and isinstance(value, list):
        items = [fault for index, part in enumerate(value) for fault in faults_of(part, item, context, (*place, index))]
    yield from items or [_unexpected(value, kind, context, place)]


def _of_section(
    value: Mapping[str, Any], structs: Sequence[type[msgspec.Struct]], context: Context, place: Place
) -> Iterator[FileFault]:
    """Yield the faults of a section; of several structs, its tag names the one that it is."""
    (tag_field,) = {struct.__struct_config__.tag_field for struct in structs}
    if tag_field is None or (len(structs) == 1 and tag_field not in value):
        yield from _of_struct(value, structs[0], context, place)
        return
    by_tag = {str(struct.__struct_config__.tag): struct for struct in structs}
    kind: Any = Literal[tuple(by_tag)]
    if tag_field not in value:
        yield _missing(kind, context, (*place, tag_field))
    elif not isinstance(tag := value[tag_field], str) or tag not in by_tag:
        yield _unexpected(tag, kind, context, (*place, tag_field))
    else:
        yield from _of_struct(value, by_tag[tag], context, place)


def _of_struct(
    value: Mapping[str, Any], struct: type[msgspec.Struct], context: Context, place: Place
) -> Iterator[FileFault]:
    fields = {known.encode_name: known for known in msgspec.structs.fields(struct)}
    tag_field = struct.__struct_config__.tag_field
    known = [*([tag_field] if tag_field else []), *fields, *context.shortcuts.get(place, ())]
    meant = {name: did_you_mean(name, known) for name in value if name not in fields and name != tag_field}
    found = []
    if struct.__struct_config__.forbid_unknown_fields:
        found += [_unknown(name, value[name], near, known, place, context) for name, near in meant.items()]
    for name, about in fields.items():
        if name in value:
            found += faults_of(value[name], about.type, context, (*place, name))
        elif about.required and not {name, *context.shortcuts.get(place, ())} & set(meant.values()):
            found.append(_missing(about.type, context, (*place, name)))
    yield from found
    wrong = {str(fault.place[len(place)]) for fault in found} | set(meant)
    rest = {name: part for name, part in value.items() if name not in wrong}
    for problem in _relations({**context.stand_ins, **rest} if not place else rest, struct):
        if not any(re.search(rf"\b{re.escape(name)}\b", problem) for name in {*wrong, *context.doubtful}):
            yield FileFault(place, f"{_name(place)}: {problem}") if place else _named(problem)


def _relations(value: Mapping[str, Any], struct: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the problems that a struct finds when its fields, each valid, come together (``__post_init__``)."""
    try:
        msgspec.convert(value, struct)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):  # otherwise a field is missing, which is reported already
            yield from map(str, error.__cause__.args)


def _named(problem: str) -> FileFault:
    """Return a problem that begins with the name of its setting (`_name`) as a fault there."""
    setting = _SETTING.match(problem)
    keys = re.findall(r"\w+", setting[0]) if setting else []
    return FileFault(tuple(int(key) if key.isdigit() else key for key in keys), problem)


def _unknown(
    name: str, value: object, near: str | None, known: Collection[str], place: Place, context: Context
) -> FileFault:
    where = f"[{_name(place)}]" if place else "the file"
    hint = f"did you mean {near}?" if near else f"{where} may have {', '.join(known)}"
    if homes := [f"in [{home}]" if home else "at the top, above all sections" for home in context.homes.get(name, ())]:
        hint = f"it belongs {' or '.join(homes)}"
    elif name in context.elsewhere:
        hint = context.elsewhere[name]
    noun = "section" if isinstance(value, Mapping) else "setting"
    return FileFault((*place, name), f"{_name((*place, name))} is no {noun}; {hint}")


def _missing(kind: Any, context: Context, place: Place) -> FileFault:
    return FileFault(place, f"{_name(place)} is missing: expected {context.forms.get(place) or expected(kind)}")


def _unexpected(value: object, kind: Any, context: Context, place: Place) -> FileFault:
    bare, _ = _split(kind)
    choices = [str(choice) for part in _members(bare) if get_origin(part) is Literal for choice in get_args(part)]
    near = did_you_mean(value, choices) if isinstance(value, str) else None
    hint = f"; did you mean {near}?" if near else ""
    form = context.forms.get(place) or expected(kind)
    return FileFault(place, f"{_name(place)}: expected {form}, got {shown(value)}{hint}")


def _name(place: Place) -> str:
    """Return the place as a reader writes it: ``fault[0].kind``."""
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return name.removeprefix(".")


def expected(kind: Any) -> str:
    """Describe the values of a field's type in words: ``a whole number, 1 to 64``."""
    bare, metas = _split(kind)
    if form := next((meta.description for meta in metas if meta.description), None):
        return form
    parts = _members(bare)
    if len(parts) > 1:
        return " or ".join(dict.fromkeys(map(expected, parts)))
    if get_origin(parts[0]) is Literal:
        choices = ", ".join(map(str, get_args(parts[0])))
        return f"one of {choices}" if len(get_args(parts[0])) > 1 else choices
    return ", ".join([_noun(parts[0]), *(words for meta in metas if (words := _bounds(meta)))])


def _noun(kind: Any) -> str:
    if kind in NOUNS:
        return NOUNS[kind]
    return "a section" if _item_kind(kind) is None else "a list in brackets"


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


def _split(kind: Any) -> tuple[Any, list[msgspec.Meta]]:
    """Return a type without its annotations, and these."""
    if get_origin(kind) is not Annotated:
        return kind, []
    bare, *metas = get_args(kind)
    return bare, [meta for meta in metas if isinstance(meta, msgspec.Meta)]


def _members(kind: Any) -> Sequence[Any]:
    """Return the types of a union, without None, which TOML does not have; of another type, the type itself."""
    if get_origin(kind) not in (Union, types.UnionType):
        return (kind,)
    return [part for part in get_args(kind) if part is not type(None)]


def _item_kind(kind: Any) -> Any:
    """Return the type of a list's items; None if ``kind`` is no list, and allows none."""
    bares = [_split(part)[0] for part in _members(kind)]
    return next((get_args(bare)[0] for bare in bares if get_origin(bare) in (tuple, list)), None)
