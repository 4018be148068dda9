"""Marks the loops that are over whole buffers, so that a loop costs one check and not one an access.

What was elementwise, a broadcast or a reduction is a ``linalg.generic`` once it has buffers, and its loops go through
each operand of a static shape and the plain layout exactly once around: no index in it can be outside. So such an
operand is *pinned* before the loop: a call that says where the buffer begins, and how many bytes there are. When the
program runs they must all be the program's own; a pointer that is anything else ends the program with an error.
What the loop does with a pinned buffer is not looked at again, and LLVM makes vector code of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_ITEMS = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8, "index": 8}
_LOOP = re.compile(r"^(\s*)linalg\.generic \{.*?\} (?:ins\((?P<ins>.*?)\) )?outs\((?P<outs>.*?)\)")
_TYPE = re.compile(r"memref<[^<>]*(?:<[^<>]*>[^<>]*)*>|[\w.]+")
_PLAIN = re.compile(r"memref<((?:\d+x)+)(\w+)>")
NAME = "hal_pin_"
_DECLARATION = re.compile(rf"^declare (\{{.*\}}) @({NAME}(\d+)_\w+)\((.*)\)")
_CALL = re.compile(rf"^(\s*(%[\w.]+) = call .*@{NAME}\w+\()")
_POINTER = re.compile(r"^\s*(%[\w.]+) = extractvalue \{.*\} (%[\w.]+), 1$")
_ELEMENT = re.compile(r"^\s*(%[\w.]+) = getelementptr (?:inbounds )?(?:nuw )?\w+, ptr (%[\w.]+), ")


def pin(module: str) -> str:
    """A module of linalg on buffers, with each plain operand of each loop pinned.

    Example:
        >>> print(pin("module {\\n  linalg.generic {} ins(%a : memref<4xf32>) outs(%b : memref<?xf32>) {\\n}"))
        module {
        func.func private @hal_pin_16_4xf32(memref<4xf32>) -> memref<4xf32>
          %hal.pin1_0 = func.call @hal_pin_16_4xf32(%a) : (memref<4xf32>) -> memref<4xf32>
          linalg.generic {} ins(%hal.pin1_0 : memref<4xf32>) outs(%b : memref<?xf32>) {
        }
    """
    declared: dict[str, str] = {}
    out: list[str] = []
    for number, line in enumerate(module.splitlines()):
        match = _LOOP.match(line)
        pinned: dict[str, str] = {}
        for group in ("ins", "outs") if match else ():
            given = match[group] if match else None
            if not given:
                continue
            names, types = given.split(" : ", 1)
            operands = names.split(", ")
            for i, (name, type_) in enumerate(zip(operands, _TYPE.findall(types), strict=True)):
                plain = _PLAIN.fullmatch(type_)
                if plain is None:
                    continue
                dims, item = plain.groups()
                function = f"{NAME}{math.prod(map(int, dims[:-1].split('x'))) * _ITEMS[item]}_{dims}{item}"
                declared[function] = f"func.func private @{function}({type_}) -> {type_}"
                if name not in pinned:
                    pinned[name] = f"%hal.pin{number}_{len(pinned)}"
                    out.append(f"  {pinned[name]} = func.call @{function}({name}) : ({type_}) -> {type_}")
                operands[i] = pinned[name]
            line = line.replace(f"({given})", f"({', '.join(operands)} : {types})", 1)
        out.append(line)
    start = next(i for i, line in enumerate(out) if line.startswith("module"))
    return "\n".join([*out[: start + 1], *declared.values(), *out[start + 1 :]])


def call(line: str) -> str:
    """A line of LLVM IR; where it calls a pin, with what `definition` wants."""
    return _CALL.sub(r"\1ptr %hal.state, i64 %hal.arena, i64 %hal.end, ", line)


def definition(line: str, traced: bool) -> str | None:
    """The function of a pin in LLVM IR, where `line` declares one: what it is given, if that is all in the arena."""
    match = _DECLARATION.match(line)
    if match is None:
        return None
    type_, name, size, params = match.groups()
    kinds = params.split(", ")
    rank = (len(kinds) - 3) // 2
    places = ["0", "1", "2", *(f"{part}, {d}" for part in (3, 4) for d in range(rank))]
    body = "\n".join(
        f"  %r{i} = insertvalue {type_} {f'%r{i - 1}' if i else 'poison'}, {kind} %p{i}, {place}"
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    )
    given = ", ".join(f"{kind} %p{i}" for i, kind in enumerate(kinds))
    return f"""
define internal {type_} @{name}(ptr %state, i64 %arena, i64 %end, {given}) alwaysinline {{
  %at = ptrtoint ptr %p1 to i64
  %last = sub i64 %end, {size}
  %low = icmp uge i64 %at, %arena
  %high = icmp ule i64 %at, %last
  %inside = and i1 %low, %high
  br i1 {"%inside" if traced else "true"}, label %ok, label %stray
stray:
  call void @hal_stray(ptr %state, ptr %p1, i64 {size})
  unreachable
ok:
{body}
  ret {type_} %r{len(kinds) - 1}
}}
"""


def elements(lines: Sequence[str]) -> set[str]:
    """The pointers, in LLVM IR, to single elements of what pins give."""
    given, starts, found = set(), set(), set()
    for line in lines:
        if match := _CALL.match(line):
            given.add(match[2])
        elif (match := _POINTER.match(line)) and match[2] in given:
            starts.add(match[1])
        elif (match := _ELEMENT.match(line)) and match[2] in starts:
            found.add(match[1])
    return found
