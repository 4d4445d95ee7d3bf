"""Good messages of a type, generated from the type: each structure with its smallest and its largest content."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

# Length of values whose length the type does not bound, or bounds by more.
_MANY = 3


def samples(kind: Any) -> list[bytes]:
    """Return MessagePack of two values of each structure of a type, which may be a union."""
    info = inspect.type_info(kind)
    parts = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [msgspec.msgpack.encode(_value(part, is_large)) for part in parts for is_large in (False, True)]


def _value(kind: inspect.Type, is_large: bool) -> Any:
    match kind:
        case inspect.StructType():
            fields = {field.encode_name: _value(field.type, is_large) for field in kind.fields}
            if kind.array_like:
                return [*([] if kind.tag is None else [kind.tag]), *fields.values()]
            return fields | ({} if kind.tag is None or kind.tag_field is None else {kind.tag_field: kind.tag})
        case inspect.UnionType():
            return _value(kind.types[-1 if is_large else 0], is_large)
        case inspect.BytesType() | inspect.StrType():
            size = _length(kind.min_length, kind.max_length, is_large)
            return b"\1" * size if isinstance(kind, inspect.BytesType) else "x" * size
        case inspect.ListType() | inspect.VarTupleType():
            size = _length(kind.min_length, kind.max_length, is_large)
            return [_value(kind.item_type, is_large)] * size
        case inspect.TupleType():
            return [_value(item, is_large) for item in kind.item_types]
        case inspect.DictType():
            size = _length(kind.min_length, kind.max_length, is_large)
            return {_value(kind.key_type, is_large): _value(kind.value_type, is_large)} if size else {}
        case inspect.IntType():
            bounds = kind.le if kind.le is not None else 2**31, kind.ge if kind.ge is not None else 0
            return bounds[0] if is_large else bounds[1]
        case inspect.FloatType():
            return float(kind.le or 1.0) if is_large else float(kind.ge or 0.0)
        case inspect.BoolType():
            return is_large
        case inspect.LiteralType():
            return kind.values[-1 if is_large else 0]
        case inspect.EnumType():
            return list(kind.cls)[-1 if is_large else 0].value
        case _:
            return None


def _length(least: int | None, most: int | None, is_large: bool) -> int:
    least = least or 0
    return max(least, min(_MANY, _MANY if most is None else most)) if is_large else least
