"""Rewrites a kernel's LLVM IR so that every access to memory goes through a check.

A pointer argument is handed to the kernel not as an address but as a *handle* (``runtime.c`` has its form):
arithmetic on it never loses which argument it came from, and no processor can follow it, so an access that
the rewriting missed would fault instead of corrupting memory. `hal_at` turns a handle into an address, after
``hal_check`` has looked at the argument's extent, the gaps between a view's rows, and who else has touched
those bytes.

Most accesses are to a program's own buffers, in loops over the whole of one: there the loop has the check (`pins`).
Elsewhere LLVM inlines `hal_at`, and leaves nothing of it where it can see that the access is inside the buffer; an
address in the arena that it can't see through costs a comparison.
"""

from __future__ import annotations

import re

from hal.lowered import pins, runtime
from hal.lowered.errors import LoweringError

SIZES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}

_LOAD = re.compile(r"^(\s*%[\w.]+ = load (?:volatile )?)([^,]+), ptr (%[\w.]+|@[\w.]+)(.*)$")
_STORE = re.compile(r"^(\s*store (?:volatile )?)(.+), ptr (%[\w.]+|@[\w.]+)((?:, (?:align|!).*)?)$")
_OTHER_ACCESS = re.compile(r"\b(load|store|atomicrmw|cmpxchg)\b")
_ALLOCA = re.compile(r"^\s*(%[\w.]+) = alloca ")
_DEFINE = re.compile(r"^define void @([\w.$]+)\((.*?)\)", re.M)
_DECLARE = re.compile(r"^declare [^@]*@([\w.]+)\(.*$", re.M)
_CONSTANT = re.compile(r"^@([\w.]+) = (?:private|internal) (?:unnamed_addr )?constant (\[.*?\]|\w+) ", re.M)

# Decides at run time which buffers to free. It works on the kernel's stack, never on its arguments' memory.
_HELPER = "dealloc_helper"
_OURS = {"malloc": "hal_alloc", "free": "hal_free", "memrefCopy": "hal_copy"}
_CALL = re.compile(r"@(malloc|free|memrefCopy)\(")
_MEMCPY = re.compile(r"call void @llvm\.mem(?:cpy|move)\.[\w.]+\(ptr ([^,]+), ptr ([^,]+), i64 ([^,]+), i1 \w+\)")
_BF16 = re.compile(r" = (fpext|fptrunc) ((?:bfloat|float) %[\w.]+) to (bfloat|float)$")
_MEMSET = re.compile(r"call void @llvm\.memset\.[\w.]+\(ptr ([^,]+), i8 ([^,]+), i64 ([^,]+), i1 \w+\)")
# What a C library has under the names that LLVM's math intrinsics become, and the kernels' own use.
_LIBM = {f + suffix for f in ("exp", "log", "sin", "cos", "tanh", "erf", "pow", "fma", "fmod") for suffix in ("", "f")}

_DECLARATIONS = """
declare noalias align 64 ptr @hal_alloc(ptr, i64) allocsize(1)
declare void @hal_free(ptr, ptr)
declare void @hal_copy(ptr, i64, ptr, ptr)
declare void @hal_memcpy(ptr, ptr, ptr, i64)
declare void @hal_memset(ptr, ptr, i8, i64)
declare void @hal_stray(ptr, ptr, i64) cold noreturn
"""

# By integers: on every CPU the same, subnormals too, and LLVM makes vector code of it.
_CONVERSIONS = """
define internal float @hal_fpext(bfloat %x) alwaysinline {
  %bits = bitcast bfloat %x to i16
  %wide = zext i16 %bits to i32
  %high = shl i32 %wide, 16
  %y = bitcast i32 %high to float
  ret float %y
}

define internal bfloat @hal_fptrunc(float %x) alwaysinline {
  %bits = bitcast float %x to i32
  %kept = lshr i32 %bits, 16
  %odd = and i32 %kept, 1
  %half = add i32 %odd, 32767
  %near = add i32 %bits, %half
  %nan = fcmp uno float %x, %x
  %quiet = or i32 %bits, 4194304
  %rounded = select i1 %nan, i32 %quiet, i32 %near
  %high = lshr i32 %rounded, 16
  %word = trunc i32 %high to i16
  %y = bitcast i16 %word to bfloat
  ret bfloat %y
}
"""

_AT = """
declare ptr @hal_check(ptr, ptr, i64, i64)
declare i64 @llvm.objectsize.i64.p0(ptr, i1, i1, i1)

define internal ptr @hal_at(ptr %state, i64 %arena, i64 %room, ptr %p, i64 %size, i64 %access) alwaysinline {
  %left = call i64 @llvm.objectsize.i64.p0(ptr %p, i1 true, i1 false, i1 true)
  %known = icmp ule i64 %size, %left
  br i1 %known, label %same, label %near
near:
  %a = ptrtoint ptr %p to i64
  %into = sub i64 %a, %arena
  %inside = icmp ult i64 %into, %room
  br i1 %inside, label %same, label %far
same:
  ret ptr %p
far:
  %checked = call ptr @hal_check(ptr %state, ptr %p, i64 %size, i64 %access)
  ret ptr %checked
}
"""


def params(llvm: str) -> tuple[str, list[str]]:
    """Name and parameter types of the kernel in this IR. Beside it stands at most MLIR's `_HELPER`."""
    found = [(name, text) for name, text in _DEFINE.findall(llvm) if name != _HELPER]
    if len(found) != 1:
        raise LoweringError(
            found[0][0] if found else "?", "instrumentation", f"{len(found)} functions in the IR, expected 1"
        )
    name, text = found[0]
    return name, [p.strip().split()[0] for p in text.split(",")]


def instrument(llvm: str, traced: bool) -> str:
    """The kernel's IR with every access checked (or, untraced, as it was), and what ``hal_run`` calls.

    Raises:
        LoweringError: the IR calls something, or accesses memory in a way, that the runtime doesn't know.
    """
    name, types = params(llvm)
    for callee in _DECLARE.findall(llvm):
        if callee not in _OURS and callee not in _LIBM and not callee.startswith(("llvm.", pins.NAME)):
            raise LoweringError(
                name, "instrumentation", f"it calls the external function {callee}, which only the device has"
            )
    lines = llvm.splitlines()
    own = pins.elements(lines)
    out: list[str] = []
    in_kernel = False
    for number, line in enumerate(lines):
        if line.startswith("define "):
            in_kernel = f"@{name}(" in line
            line = line.replace("define ", "define internal ", 1)
            if in_kernel:
                line = line.replace("(", "(ptr %hal.state, i64 %hal.arena, i64 %hal.room, i64 %hal.end, ", 1)
        if line.startswith("declare ") and _CALL.search(line):
            continue
        line = pins.definition(line, traced) or pins.call(line)
        if in_kernel and "call " in line:
            line = _CALL.sub(lambda call: f"@{_OURS[call[1]]}(ptr %hal.state, ", line)
            line = _MEMCPY.sub(r"call void @hal_memcpy(ptr %hal.state, ptr \1, ptr \2, i64 \3)", line)
            line = _MEMSET.sub(r"call void @hal_memset(ptr %hal.state, ptr \1, i8 \2, i64 \3)", line)
        line = _BF16.sub(r" = call \3 @hal_\1(\2)", line)
        if match := _ALLOCA.match(line):
            own.add(match[1])
        if traced and in_kernel:
            out += _check(line, number, own, name)
        else:
            out.append(line)
    ours = (_DECLARATIONS, _CONVERSIONS, _AT if traced else "", _entry(name, types), _constants(llvm))
    return "\n".join([*out, *ours])


def _check(line: str, number: int, own: set[str], kernel: str) -> list[str]:
    """`line`, and before it the check of what it accesses."""
    match = _LOAD.match(line) or _STORE.match(line)
    if match is None:
        if _OTHER_ACCESS.search(line.split(";")[0]) and "@llvm.stack" not in line and "attributes" not in line:
            raise LoweringError(kernel, "instrumentation", f"an access in a form that is not known: {line.strip()}")
        return [line]
    head, value, pointer, tail = match.groups()
    if pointer in own:
        return [line]
    size = SIZES.get(value.split()[0] if match.re is _STORE else value)
    if size is None:
        raise LoweringError(kernel, "instrumentation", f"an access of type {value}: {line.strip()}")
    access = runtime.WRITE if match.re is _STORE else 0
    given = f"ptr %hal.state, i64 %hal.arena, i64 %hal.room, ptr {pointer}, i64 {size}, i64 {access}"
    return [f"  %hal.{number} = call ptr @hal_at({given})", f"{head}{value}, ptr %hal.{number}{tail}"]


def _entry(name: str, types: list[str]) -> str:
    """``hal_entry(state, arguments, grid, program)``: the kernel for one program."""
    place = ", ".join(f"i32 %{v}" for v in ("gx", "gy", "gz", "x", "y", "z"))
    loads = [
        f"  %p{i} = getelementptr i64, ptr %args, i64 {i}\n  %a{i} = load {type_}, ptr %p{i}"
        for i, type_ in enumerate(types[:-6])
    ]
    passed = "".join(f"{type_} %a{i}, " for i, type_ in enumerate(types[:-6]))
    return f"""
define void @hal_entry(ptr %state, ptr %args, {place}) {{
  %arena.p = getelementptr i8, ptr %state, i64 {runtime.State.arena.offset}
  %arena = load i64, ptr %arena.p
  %end.p = getelementptr i8, ptr %state, i64 {runtime.State.arena_end.offset}
  %end = load i64, ptr %end.p
  %bytes = sub i64 %end, %arena
  %room = sub i64 %bytes, {max(SIZES.values()) - 1}
{chr(10).join(loads)}
  call void @{name}(ptr %state, i64 %arena, i64 %room, i64 %end, {passed}{place})
  ret void
}}
"""


def _constants(llvm: str) -> str:
    """``hal_constants``: start and end of each constant that the kernel reads, then a null."""
    found = _CONSTANT.findall(llvm)
    words = [f"ptr @{name}, ptr getelementptr ({type_}, ptr @{name}, i32 1)" for name, type_ in found]
    return f"@hal_constants = constant [{2 * len(found) + 1} x ptr] [{', '.join([*words, 'ptr null'])}]\n"
