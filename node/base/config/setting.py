"""A setting: a field of a dataclass, declared by `setting`, with its documentation for users.

The flag, the environment variable and the key in the settings file are derived from the field's name; the type of a
value is the field's. So each setting is defined in one place, and nothing can contradict it.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from farandole.protocol.wire.errors import FarandoleError

Panel = Literal["Run", "When to train", "Limits", "Network", "Page and log", "Advanced"]
"""A group of options in a command's help; help has them in this order."""
PANELS: Final[Sequence[Panel]] = get_args(Panel)

VARIABLE_PREFIX: Final = "FARANDOLE_"
_ABOUT: Final = "about"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting, with its documentation and constraints; what ``slow: float = setting(1.0, ...)`` declares."""

    name: str
    """The field's, and the key in a settings file."""
    kind: Any
    """The type of a value: ``bool``, ``int``, ``float``, ``str``, ``Path``, a list of these, or a ``Literal``."""
    annotation: Any
    """The field's: ``kind``, or ``kind | None``."""
    default: Any
    help: str
    """A sentence or two."""
    panel: Panel = "Advanced"
    """Where help shows its flag."""
    unit: str = ""
    """Of a number: ``seconds``."""
    placeholder: str = ""
    """The placeholder of a value in help, if not the unit: ``FACTOR``."""
    least: float | None = None
    """The smallest number allowed."""
    most: float | None = None
    """The largest number allowed, where there is a smallest."""
    or_zero: bool = False
    """Whether 0 ("none at all") is allowed in addition to the numbers that ``least`` allows."""
    unset: str = ""
    """The meaning of an unset setting whose default is None."""
    example: object = None
    """A value to show for a setting whose default says nothing."""
    form: str = ""
    """The required form of a value in words, where its type does not give it."""
    read: Callable[[Any], Any] = lambda value: value
    """Converts a value of the right type to the effective one; raises `FarandoleError` if its form is wrong."""
    is_argument: bool = False
    """Whether commands take it as a positional argument, without a flag."""
    is_hidden: bool = False
    """Whether help and ``config init`` leave it out: it is for the testnet."""

    @property
    def variable(self) -> str:
        """``FARANDOLE_UPLOAD_MBIT``."""
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """``--upload-mbit``; of a switch, ``--relay/--no-relay``; of an argument, nothing."""
        if self.is_argument:
            return ""
        name = self.name.replace("_", "-")
        return f"--{name}/--no-{name}" if self.kind is bool else f"--{name}"

    @property
    def expected(self) -> str:
        """Describe the allowed values in words: ``a finite number of GB, at least 0.5, or 0``."""
        from .toml_file import expected  # imports msgspec, which is not needed for ``--help``

        noun = expected(self.kind) + (f" of {self.unit}" if self.unit else "")
        return self.form or ", ".join(part for part in (noun, self.bounds) if part)

    @property
    def bounds(self) -> str:
        """Describe the bounds of a number in words; empty if there are none."""
        if self.least is None:
            return ""
        words = f"at least {self.least:g}" if self.most is None else f"{self.least:g} to {self.most:g}"
        return f"{words}, or 0" if self.or_zero else words

    def is_allowed(self, value: Any) -> bool:
        """Return whether a value of the right type is within its bounds and has the right form."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        try:
            self.read(value)
        except FarandoleError:
            return False
        if value is None or self.least is None or (self.or_zero and value == 0):
            return True
        return bool(value >= self.least and (self.most is None or value <= self.most))

    def is_valid(self, value: object) -> bool:
        """Return whether ``value``, as read from a settings file, has the right type and is allowed."""
        import msgspec

        try:
            converted = msgspec.convert(value, self.kind, dec_hook=lambda kind, text: kind(text))
        except msgspec.ValidationError:
            return False
        return self.is_allowed(converted)


def setting(default: object, help: str, **about: Any) -> Any:
    """Return a dataclass field that is a setting; ``about``: fields of `Setting`."""
    metadata = {_ABOUT: {"help": help, **about}}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def settings_of(owner: type) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares, in order, without its other fields."""
    annotations, found = get_type_hints(owner), []
    for field in dataclasses.fields(owner):
        if (about := field.metadata.get(_ABOUT)) is None:
            continue
        kind = annotation = annotations[field.name]
        if get_origin(annotation) in (Union, types.UnionType):
            (kind,) = (part for part in get_args(annotation) if part is not type(None))
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found.append(Setting(field.name, kind, annotation, default, **about))
    return tuple(found)
