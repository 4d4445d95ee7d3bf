"""What a setting is: a field of a dataclass, declared by `setting`, and all that people are told about it.

Flag, environment variable and key of the settings file are made of the field's name, the type of a value is the
field's. So there is one place to change, and nothing that could say otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from farandole.protocol.errors import FarandoleError

VARIABLE_PREFIX: Final = "FARANDOLE_"
_ABOUT: Final = "about"
_NOUNS: Final[dict[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text in quotes",
    Path: "a path in quotes",
}
_PLURALS: Final[dict[object, str]] = {str: "texts in quotes", Path: "paths in quotes"}


@dataclasses.dataclass(frozen=True)
class About:
    """What people are told of a setting, beside its name, type and default."""

    help: str
    """A sentence or two."""
    unit: str = ""
    """Of a number: ``seconds``."""
    placeholder: str = ""
    """What stands for a value in help, if not the unit: ``FACTOR``."""
    least: float | None = None
    """The smallest number allowed."""
    most: float | None = None
    """The largest number allowed, where there is a smallest."""
    or_zero: bool = False
    """0 is allowed beside what ``least`` allows, for none at all."""
    unset: str = ""
    """What it means that a setting whose default is None is not set."""
    example: object = None
    """A value for those to see whose default says nothing."""
    form: str = ""
    """What a value must be, in words, where its type does not say it."""
    read: Callable[[Any], Any] | None = None
    """Makes of a value of the right type the one that counts; raises `FarandoleError` for what has not the form."""
    is_argument: bool = False
    """Given to commands by its place, without a flag."""
    is_of_service: bool = False
    """For whoever starts a node, and not for the node itself."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting; what ``slow: float = setting(1.0, ...)`` declares."""

    name: str
    """The field's, and the key in a settings file."""
    kind: Any
    """The type of a value: ``bool``, ``int``, ``float``, ``str``, ``Path``, a list of these, or a ``Literal``."""
    annotation: Any
    """The field's: ``kind``, or ``kind | None``."""
    default: Any
    about: About

    @property
    def variable(self) -> str:
        """``FARANDOLE_UPLOAD_MBIT``."""
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """``--upload-mbit``; of a switch, ``--relay/--no-relay``; of an argument, nothing."""
        if self.about.is_argument:
            return ""
        name = self.name.replace("_", "-")
        return f"--{name}/--no-{name}" if self.kind is bool else f"--{name}"

    @property
    def expected(self) -> str:
        """What a value must be, in words: ``a finite number, at least 0.5, or 0``."""
        if self.about.form:
            return self.about.form
        if choices := self.choices:
            return "one of " + ", ".join(map(str, choices))
        if get_origin(self.kind) is list:
            return f"a list of {_PLURALS[get_args(self.kind)[0]]}"
        return ", ".join(part for part in (_NOUNS[self.kind], self.bounds) if part)

    @property
    def bounds(self) -> str:
        """What a number must be beside a number; nothing if it may be any."""
        about = self.about
        if about.least is None:
            return ""
        words = f"at least {about.least:g}" if about.most is None else f"{about.least:g} to {about.most:g}"
        return f"{words}, or 0" if about.or_zero else words

    @property
    def choices(self) -> Sequence[object]:
        """The values that there are, if they are few."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def is_allowed(self, value: Any) -> bool:
        """Whether a value of the right type is within its bounds, and has its form."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        about = self.about
        try:
            self.read(value)
        except FarandoleError:
            return False
        if value is None or about.least is None or (about.or_zero and value == 0):
            return True
        return bool(value >= about.least and (about.most is None or value <= about.most))

    def read(self, value: Any) -> Any:
        """The value that counts, of one of the right type. Raises `FarandoleError` for one that has not the form."""
        return value if self.about.read is None else self.about.read(value)

    def is_valid(self, value: object) -> bool:
        """Whether ``value``, as it stands in a settings file, is of the right type and allowed."""
        import msgspec  # not needed for ``--help``

        try:
            converted = msgspec.convert(value, self.kind, dec_hook=_path)
        except msgspec.ValidationError:
            return False
        return self.is_allowed(converted)


def setting(default: object, help: str, **about: Any) -> Any:
    """A dataclass field that is a setting; ``about`` are the fields of `About`."""
    metadata = {_ABOUT: About(help, **about)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def settings_of(owner: type) -> tuple[Setting, ...]:
    """The settings that a dataclass declares, in their order; its other fields are left out."""
    annotations = get_type_hints(owner)
    return tuple(
        Setting(field.name, _kind(annotations[field.name]), annotations[field.name], _default(field), about)
        for field in dataclasses.fields(owner)
        if (about := field.metadata.get(_ABOUT)) is not None
    )


def _kind(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    (kind,) = (part for part in get_args(annotation) if part is not type(None))
    return kind


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _path(kind: type, value: object) -> object:
    if isinstance(value, str):
        return kind(value)
    raise TypeError("neither a path nor a text")
