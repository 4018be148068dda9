"""Whether data has the shape that a JSON schema says: the part of JSON Schema that ours uses. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def misfits(value: Any, schema: Mapping[str, Any], at: str = "$") -> list[str]:
    """Where `value` breaks `schema`, in words. A number is finite, and True is none."""
    out = []
    if "type" in schema:
        allowed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is(value, k) for k in allowed):
            return [f"{at}: expected {' or '.join(allowed)}, got {_show(value)}"]
    if "const" in schema and value != schema["const"]:
        out.append(f"{at}: expected {schema['const']!r}, got {_show(value)}")
    if "enum" in schema and value not in schema["enum"]:
        out.append(f"{at}: expected one of {', '.join(map(str, schema['enum']))}, got {_show(value)}")
    if "minimum" in schema and value < schema["minimum"]:
        out.append(f"{at}: expected at least {schema['minimum']}, got {_show(value)}")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        out += [f"{at}: no {k}" for k in schema.get("required", ()) if k not in value]
        out += [f"{at}: extra {k}" for k in value if k not in known and rest is False]
        for k, v in value.items():
            out += misfits(v, known.get(k, rest if isinstance(rest, dict) else {}), f"{at}.{k}")
    if isinstance(value, list):
        for i, v in enumerate(value):
            out += misfits(v, schema.get("items", {}), f"{at}[{i}]")
    return out


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _KINDS[kind])


def _show(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float | bool | None) else type(value).__name__
