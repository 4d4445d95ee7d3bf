"""The settings of a run as Markdown, from the manifest's structs: their bounds, defaults and docstrings."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec import NODEFAULT
from msgspec import inspect as types

from farandole.protocol.run.manifest import Manifest

from .output import table

_HEAD: Final = """\
## Settings of a run

What a run's creator writes into its run file, for `farandole run create`. [examples/run.toml](../examples/run.toml)
explains the usual ones, and [researcher.md](researcher.md#describe-the-run) when to choose which. `farandole run show`
prints those of a run. They never change: another setting is another run. What a run file leaves out has the default;
*chosen*: `farandole run create` chooses it for your model and home lines, and prints it with the reason.
"""
_TOP: Final = ("name", "seed", "admission", "private", "audits")
# Sections that people write; commands write the others.
_SECTIONS: Final = ("model", "tokenizer", "data", "inner", "outer", "rounds", "pipeline", "screening")
# What a run file has in place of what the manifest has: key, value, meaning.
_RUN_FILE: Final = {
    "model": (
        ("preset", "a preset's name in quotes", "the sizes below; the section's other keys change them"),
        ("hf", "a folder or a config.json, in quotes", "a Hugging Face model, which the sizes below follow from"),
        ("own", '"package.module:function"', "a module of your own"),
        ("config", "a table", "the arguments of that function"),
    ),
    "tokenizer": (
        ("file", "a path in quotes", "a file of Hugging Face `tokenizers`; without it, each byte is a token"),
    ),
    "inner": (
        ("warmup_tokens", "a number above 0", "in place of `warmup_steps`: tokens of one member"),
        ("total_tokens", "a number above 0", "in place of `total_steps`: tokens of one member"),
    ),
}
_REPLACED: Final = frozenset({"model.hf", "model.own", "model.external", "tokenizer.kind", "tokenizer.sha256"})
# Bounds that only models made elsewhere may fall below.
_LEAST: Final = {"model.width": 8, "model.hidden": 8, "model.context": 8, "model.vocabulary": 2, "model.num_heads": 1}
# Left open, these are chosen (`farandole.protocol.planning.best_known` and `farandole.protocol.planning.planning`).
_CHOSEN: Final = frozenset(
    {
        *("inner.optimizer", "inner.learning_rate", "inner.warmup_steps"),
        *("outer.codec", "outer.fragments"),
        *("rounds.round_seconds", "rounds.exchange_seconds", "rounds.overlap"),
    }
)
_HEADER: Final = "| key | value | default | meaning |"


def run_settings() -> str:
    """Return the chapter about the settings of a run."""
    manifest = _struct(types.type_info(Manifest))
    top = [field for field in manifest.fields if field.name in _TOP]
    parts = [_HEAD, table(_HEADER, _rows("", top, _meanings(Manifest))), ""]
    for section in _SECTIONS:
        field = next(field for field in manifest.fields if field.name == section)
        options = field.type.types if isinstance(field.type, types.UnionType) else [field.type]
        parts += _section(section, [_struct(option) for option in options], field.default)
    return "\n".join(parts)


def _struct(kind: types.Type) -> types.StructType:
    kind = kind.type if isinstance(kind, types.Metadata) else kind
    assert isinstance(kind, types.StructType), "sections are structs"
    return kind


def _section(name: str, structs: Sequence[types.StructType], default: Any) -> Iterator[str]:
    """Yield the lines about a section; of several structs, which ``kind`` names, first the settings that all have."""
    shared = set.intersection(*({field.name for field in struct.fields} for struct in structs))
    written = ((f"`{key}`", value, "", meaning) for key, value, meaning in _RUN_FILE.get(name, ()))
    yield f"### [{name}]\n"
    if len(structs) == 1:
        yield f"{_sentences(structs[0].cls.__doc__ or '')}\n"
    elif name == "outer":
        momentum = "`alpha`, `beta`, `gamma` or `momentum`"
        yield f"Without `kind`, a run gets `plain`, or `noloco` if the section sets {momentum}.\n"
    else:
        yield f"Without `kind`, a run gets `{default.kind}`.\n"
    if common := [field for field in structs[0].fields if field.name in shared]:
        yield table(_HEADER, [*written, *_rows(name, common, _meanings(structs[0].cls))])
        yield ""
    for struct in structs if len(structs) > 1 else []:
        yield f'With `kind = "{struct.tag}"`: {_sentences(struct.cls.__doc__ or "")}\n'
        if own := [field for field in struct.fields if field.name not in shared]:
            yield table(_HEADER, _rows(name, own, _meanings(struct.cls)))
            yield ""


def _rows(section: str, fields: Sequence[types.Field], meanings: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    for field in fields:
        place = f"{section}.{field.name}"
        if place in _REPLACED:
            continue
        value = _value(field.type)
        if place in _LEAST:
            value = value.replace(" from 0 ", f" from {_LEAST[place]} ")
        default = "" if field.default in (NODEFAULT, None) else f"`{_default(field.default)}`"
        meaning = meanings.get(field.name, "")
        yield f"`{field.name}`", value, "chosen" if place in _CHOSEN else default, _sentences(meaning)


def _default(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else json.dumps(value)


def _value(kind: types.Type) -> str:
    """Describe the values that a setting takes."""
    match kind:
        case types.Metadata(type=inner, extra_json_schema=schema):
            return str((schema or {}).get("description") or _value(inner))
        case types.BoolType():
            return "true or false"
        case types.LiteralType(values=values):
            return ", ".join(f"`{json.dumps(value)}`" for value in values)
        case types.IntType() | types.FloatType():
            return _bounds(kind)
        case types.VarTupleType(item_type=item):
            return f"a list, each: {_value(item)}"
        case types.UnionType(types=options):
            named = [each for each in options if not isinstance(each, types.NoneType)]
            return "; or ".join(map(_value, named))
        case _:
            return "a text in quotes"


def _bounds(kind: types.IntType | types.FloatType) -> str:
    low, high = (kind.ge, kind.le if kind.le is not None else kind.lt)
    what = "a whole number" if isinstance(kind, types.IntType) else "a number"
    above = f" above {kind.gt:,g}" if kind.gt is not None else f" from {low:,g}" if low is not None else ""
    below = "" if high is None else f" to {high:,}" if isinstance(high, int) else f" to {high:,g}"
    return f"{what}{above}{below}{', exclusive' if kind.lt is not None else ''}"


def _meanings(struct: type) -> dict[str, str]:
    """Return the docstrings of a struct's fields, those of its bases included."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if not each.__module__.startswith("farandole."):
            continue
        [definition] = ast.parse(inspect.getsource(each)).body
        assert isinstance(definition, ast.ClassDef), "it is a struct's source"
        for field, told in pairwise(definition.body):
            match field, told:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found


def _sentences(docstring: str) -> str:
    """Return a docstring's first paragraph in one line, with names as in Markdown."""
    text = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    return re.sub(r"``([^`]*)``", r"`\1`", text).replace("null:", "left out:")
