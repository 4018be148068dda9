"""Rewrites a kernel's LLVM IR so that every access to memory goes through a check.

A pointer argument is handed to the kernel not as an address but as a *handle*, ``1 << 62 | argument << 48 |
(offset + 2**40)``: arithmetic on it never loses which argument it came from, and no processor can follow
it, so an access that the rewriting missed would fault instead of corrupting memory. `hal_at` turns a
handle into an address, after it has looked at the argument's extent, the gaps between a view's rows, and
who else has touched those bytes.

The checks are LLVM IR themselves (`RUNTIME`), compiled together with the kernel: a Python callback for
each of a tile's elements would take minutes where this takes milliseconds.
"""

from __future__ import annotations

import re

from hal.lowered.errors import LoweringError

TAG, ARG_SHIFT, BIAS = 1 << 62, 48, 1 << 40

# The machine's state, an array of i64. Indices below 64:
PROGRAM, ERROR, ERR_ARG, ERR_OFFSET, ERR_SIZE, ERR_WRITE, ERR_PROGRAM, ERR_OTHER = range(8)
ARENA, ARENA_NEXT, ARENA_END, SINK, ARGS, CONST, CONST_END = range(8, 15)
FREE, FIRST_ARG, ARG_WORDS = 16, 64, 32
# Words of an argument's entry.
BASE, EXTENT, WRITERS, READERS, SHARED, DIMS, INNER, DIM0 = range(8)
COUNT, BYTES, COPIES = 16, 20, 24
# Values of ERROR.
BOUNDS, RACE, WILD, MEMORY = 1, 2, 3, 4
# Bits of an access.
WRITE, COPY = 1, 2

SIZES = {
    "i1": 1,
    "i8": 1,
    "i16": 2,
    "half": 2,
    "bfloat": 2,
    "i32": 4,
    "float": 4,
    "i64": 8,
    "double": 8,
    "ptr": 8,
}

_LOAD = re.compile(r"^(\s*%[\w.]+ = load (?:volatile )?)([^,]+), ptr (%[\w.]+|@[\w.]+)(.*)$")
_STORE = re.compile(r"^(\s*store (?:volatile )?)(.+), ptr (%[\w.]+|@[\w.]+)((?:, (?:align|!).*)?)$")
_ALLOCA = re.compile(r"^\s*(%[\w.]+) = alloca ")
_DEFINE = re.compile(r"^define void @([\w.$]+)\((.*?)\)", re.M)
_DECLARE = re.compile(r"^declare [^@]*@([\w.]+)\(.*$", re.M)
_GLOBAL = re.compile(
    r"^@([\w.]+) = (?:private|internal) (?:unnamed_addr )?constant (.+?)(?:, align \d+)?$", re.M
)

# Decides at run time which buffers to free. It works on the kernel's stack, never on its arguments' memory.
_HELPER = "dealloc_helper"
_OURS = {"malloc": "hal_alloc", "free": "hal_free", "memrefCopy": "memrefCopy"}
_MEMCPY = re.compile(
    r"call void @llvm\.mem(?:cpy|move)\.[\w.]+\(ptr ([^,]+), ptr ([^,]+), i64 ([^,]+), i1 \w+\)"
)
_MEMSET = re.compile(r"call void @llvm\.memset\.[\w.]+\(ptr ([^,]+), i8 ([^,]+), i64 ([^,]+), i1 \w+\)")
# What a C library has under the names that LLVM's math intrinsics become, and the kernels' own use.
_LIBM = {
    f + suffix
    for f in ("exp", "log", "sin", "cos", "tanh", "erf", "pow", "fma", "fmod")
    for suffix in ("", "f")
}


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
    """The kernel's IR with every access checked (or, untraced, as it was), its runtime, and ``hal_run``.

    Raises:
        LoweringError: the IR calls something, or accesses memory in a way, that the runtime doesn't know.
    """
    name, types = params(llvm)
    for callee in _DECLARE.findall(llvm):
        if callee not in _OURS and callee not in _LIBM and not callee.startswith("llvm."):
            raise LoweringError(
                name, "instrumentation", f"it calls the external function {callee}, which only the device has"
            )
    own: set[str] = set()
    out: list[str] = []
    helping = False
    for number, line in enumerate(llvm.splitlines()):
        if line.startswith("define "):
            helping = f"@{_HELPER}(" in line
        if line.startswith("declare ") and any(f"@{c}(" in line for c in _OURS):
            continue
        if line.startswith("define void @"):
            line = "define internal" + line[len("define") :]
        if "call " in line:
            for theirs, ours in _OURS.items():
                line = line.replace(f"@{theirs}(", f"@{ours}(")
            line = _MEMCPY.sub(r"call void @hal_memcpy(ptr \1, ptr \2, i64 \3)", line)
            line = _MEMSET.sub(r"call void @hal_memset(ptr \1, i8 \2, i64 \3)", line)
        if match := _ALLOCA.match(line):
            own.add(match[1])
        if traced and not helping:
            out += _checked(line, number, own, name)
        else:
            out.append(line)
    text = "\n".join(out)
    span = [g for g, _ in _GLOBAL.findall(llvm)]
    return "\n".join(
        [text, RUNTIME, AT if traced else AT_UNTRACED, _entry(name, types), _constants(span, llvm)]
    )


def _checked(line: str, number: int, own: set[str], kernel: str) -> list[str]:
    def via(pointer: str, type_: str, access: int) -> tuple[str, str]:
        size = SIZES.get(type_)
        if size is None:
            raise LoweringError(kernel, "instrumentation", f"an access of type {type_}: {line.strip()}")
        to = f"%hal.{number}"
        return to, f"  {to} = call ptr @hal_at(ptr {pointer}, i64 {size}, i64 {access})"

    if match := _LOAD.match(line):
        head, type_, pointer, tail = match.groups()
        if pointer in own:
            return [line]
        to, check = via(pointer, type_, 0)
        return [check, f"{head}{type_}, ptr {to}{tail}"]
    if match := _STORE.match(line):
        head, value, pointer, tail = match.groups()
        if pointer in own:
            return [line]
        to, check = via(pointer, value.split()[0], WRITE)
        return [check, f"{head}{value}, ptr {to}{tail}"]
    code = line.split(";")[0]
    if (
        re.search(r"\b(load|store|atomicrmw|cmpxchg)\b", code)
        and "@llvm.stack" not in code
        and "attributes" not in code
    ):
        raise LoweringError(
            kernel, "instrumentation", f"an access in a form that is not known: {line.strip()}"
        )
    return [line]


def _entry(name: str, types: list[str]) -> str:
    """``hal_run(state, arguments, grid)``: the kernel, once for each program of the grid."""
    loads, passed = [], []
    for i, type_ in enumerate(types[:-6]):
        loads.append(f"  %p{i} = getelementptr i64, ptr %args, i64 {i}\n  %a{i} = load {type_}, ptr %p{i}")
        passed.append(f"{type_} %a{i}")
    passed += [f"i32 %{v}" for v in ("gx", "gy", "gz", "x", "y", "z")]
    return f"""
define void @hal_run(ptr %state, ptr %args, i32 %gx, i32 %gy, i32 %gz) {{
entry:
  store ptr %state, ptr @hal_s
  %program.p = getelementptr i64, ptr %state, i64 {PROGRAM}
  %error.p = getelementptr i64, ptr %state, i64 {ERROR}
{chr(10).join(loads)}
  %gxy = mul i32 %gx, %gy
  %total = mul i32 %gxy, %gz
  br label %head
head:
  %i = phi i32 [ 0, %entry ], [ %next, %body ]
  %error = load i64, ptr %error.p
  %fine = icmp eq i64 %error, 0
  %more = icmp ult i32 %i, %total
  %go = and i1 %fine, %more
  br i1 %go, label %body, label %end
body:
  %next = add i32 %i, 1
  %wide = zext i32 %next to i64
  store i64 %wide, ptr %program.p
  call void @hal_reset()
  %x = urem i32 %i, %gx
  %yz = udiv i32 %i, %gx
  %y = urem i32 %yz, %gy
  %z = udiv i32 %yz, %gy
  call void @{name}({", ".join(passed)})
  br label %head
end:
  ret void
}}
"""


def _constants(names: list[str], llvm: str) -> str:
    """``hal_constant(i)``: start and length of each constant array that the kernel reads."""
    body = []
    for i, name in enumerate(names):
        kind = re.search(rf"^@{re.escape(name)} = .*?constant (\[.*?\]) ", llvm, re.M)
        if kind is None:
            kind = re.search(rf"^@{re.escape(name)} = .*?constant (\w+) ", llvm, re.M)
        assert kind is not None, name
        size = f"ptrtoint (ptr getelementptr ({kind[1]}, ptr null, i32 1) to i64)"
        body.append(
            f"  %in{i}.d = sub i64 %a, ptrtoint (ptr @{name} to i64)\n  %in{i} = icmp ult i64 %in{i}.d, {size}\n"
            f"  %any{i + 1} = or i1 %any{i}, %in{i}"
        )
    return (
        "define internal i1 @hal_constant(i64 %a) {\n  %any0 = icmp ne i64 0, 0\n"
        + "\n".join(body)
        + f"\n  ret i1 %any{len(names)}\n}}\n"
    )


def _word(index: int, pointer: str = "%s") -> str:
    return f"getelementptr i64, ptr {pointer}, i64 {index}"


RUNTIME = f"""
@hal_s = internal global ptr null

declare i64 @llvm.ctlz.i64(i64, i1)
declare ptr @malloc(i64)

define internal void @hal_fail(i64 %kind, i64 %arg, i64 %offset, i64 %size, i64 %access, i64 %other) noinline {{
  %s = load ptr, ptr @hal_s
  %kind.p = {_word(ERROR)}
  %had = load i64, ptr %kind.p
  %first = icmp eq i64 %had, 0
  br i1 %first, label %note, label %end
note:
  store i64 %kind, ptr %kind.p
  %arg.p = {_word(ERR_ARG)}
  store i64 %arg, ptr %arg.p
  %offset.p = {_word(ERR_OFFSET)}
  store i64 %offset, ptr %offset.p
  %size.p = {_word(ERR_SIZE)}
  store i64 %size, ptr %size.p
  %access.p = {_word(ERR_WRITE)}
  store i64 %access, ptr %access.p
  %program.p = {_word(PROGRAM)}
  %program = load i64, ptr %program.p
  %where.p = {_word(ERR_PROGRAM)}
  store i64 %program, ptr %where.p
  %other.p = {_word(ERR_OTHER)}
  store i64 %other, ptr %other.p
  br label %end
end:
  ret void
}}

; What a refused access gets instead: zeros to read (a loop bound read there ends its loop), a page to write.
define internal ptr @hal_sink(i64 %access) {{
  %s = load ptr, ptr @hal_s
  %sink.p = {_word(SINK)}
  %sink = load ptr, ptr %sink.p
  %write = and i64 %access, {WRITE}
  %off = mul i64 %write, 4096
  %at = getelementptr i8, ptr %sink, i64 %off
  ret ptr %at
}}

; Buffers of a program: power-of-two blocks, a free list for each size, all forgotten between programs.
; Where the arena is full, the launch has failed, but the program goes on to its end: untraced, it needs the memory.
; They are filled with 0x7f (large in every integer type, large or NaN in every float): a program must not
; depend on what its buffers held before.
define internal void @hal_reset() {{
  %s = load ptr, ptr @hal_s
  %lo.p = {_word(ARENA)}
  %lo = load i64, ptr %lo.p
  %next.p = {_word(ARENA_NEXT)}
  store i64 %lo, ptr %next.p
  %free = {_word(FREE)}
  call void @llvm.memset.p0.i64(ptr %free, i8 0, i64 {(FIRST_ARG - FREE) * 8}, i1 false)
  ret void
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define internal ptr @hal_alloc(i64 %size) noinline {{
  %s = load ptr, ptr @hal_s
  %small = icmp ult i64 %size, 64
  %want = select i1 %small, i64 64, i64 %size
  %less = sub i64 %want, 1
  %zeros = call i64 @llvm.ctlz.i64(i64 %less, i1 false)
  %class = sub i64 64, %zeros
  %list = getelementptr i64, ptr %s, i64 %class
  %head.p = getelementptr i64, ptr %list, i64 {FREE}
  %head = load i64, ptr %head.p
  %none = icmp eq i64 %head, 0
  br i1 %none, label %fresh, label %pop
pop:
  %popped = inttoptr i64 %head to ptr
  %link = load i64, ptr %popped
  store i64 %link, ptr %head.p
  br label %give
fresh:
  %next.p = {_word(ARENA_NEXT)}
  %next = load i64, ptr %next.p
  %block = shl i64 1, %class
  %whole = add i64 %block, 64
  %after = add i64 %next, %whole
  %end.p = {_word(ARENA_END)}
  %end = load i64, ptr %end.p
  %full = icmp ugt i64 %after, %end
  br i1 %full, label %fail, label %bump
fail:
  call void @hal_fail(i64 {MEMORY}, i64 0, i64 0, i64 %size, i64 0, i64 0)
  %more = call ptr @malloc(i64 %whole)
  %beyond = ptrtoint ptr %more to i64
  br label %take
bump:
  store i64 %after, ptr %next.p
  br label %take
take:
  %at = phi i64 [ %next, %bump ], [ %beyond, %fail ]
  %label = inttoptr i64 %at to ptr
  store i64 %class, ptr %label
  %payload = add i64 %at, 64
  %made = inttoptr i64 %payload to ptr
  br label %give
give:
  %p = phi ptr [ %popped, %pop ], [ %made, %take ]
  call void @llvm.memset.p0.i64(ptr %p, i8 127, i64 %size, i1 false)
  ret ptr %p
}}

define internal void @hal_free(ptr %p) noinline {{
  %s = load ptr, ptr @hal_s
  %label = getelementptr i8, ptr %p, i64 -64
  %class = load i64, ptr %label
  %list = getelementptr i64, ptr %s, i64 %class
  %head.p = getelementptr i64, ptr %list, i64 {FREE}
  %head = load i64, ptr %head.p
  store i64 %head, ptr %p
  %now = ptrtoint ptr %p to i64
  store i64 %now, ptr %head.p
  ret void
}}

define internal i1 @hal_failed() {{
  %s = load ptr, ptr @hal_s
  %error.p = {_word(ERROR)}
  %error = load i64, ptr %error.p
  %failed = icmp ne i64 %error, 0
  ret i1 %failed
}}

define internal void @hal_memcpy(ptr %to, ptr %from, i64 %n) noinline {{
  %empty = icmp eq i64 %n, 0
  br i1 %empty, label %end, label %copy
copy:
  call void @hal_copies(ptr %from, i64 0)
  call void @hal_copies(ptr %to, i64 {WRITE})
  call void @hal_row(ptr %to, ptr %from, i64 %n)
  br label %end
end:
  ret void
}}

define internal void @hal_row(ptr %to, ptr %from, i64 %n) {{
  %src = call ptr @hal_at(ptr %from, i64 %n, i64 {COPY})
  %dst = call ptr @hal_at(ptr %to, i64 %n, i64 {COPY | WRITE})
  %failed = call i1 @hal_failed()
  br i1 %failed, label %end, label %copy
copy:
  call void @llvm.memmove.p0.p0.i64(ptr %dst, ptr %src, i64 %n, i1 false)
  br label %end
end:
  ret void
}}
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)

define internal void @hal_memset(ptr %to, i8 %value, i64 %n) noinline {{
  %dst = call ptr @hal_at(ptr %to, i64 %n, i64 {COPY | WRITE})
  %failed = call i1 @hal_failed()
  br i1 %failed, label %end, label %fill
fill:
  call void @llvm.memset.p0.i64(ptr %dst, i8 %value, i64 %n, i1 false)
  br label %end
end:
  ret void
}}

; MLIR's own: copies between two unranked descriptors (rank, ptr to (ptr, aligned ptr, offset, sizes, strides)).
define internal void @memrefCopy(i64 %item, ptr %src.u, ptr %dst.u) noinline {{
entry:
  %index = alloca [16 x i64]
  call void @llvm.memset.p0.i64(ptr %index, i8 0, i64 128, i1 false)
  %rank = load i64, ptr %src.u
  %src.d.p = {_word(1, "%src.u")}
  %src.d = load ptr, ptr %src.d.p
  %dst.d.p = {_word(1, "%dst.u")}
  %dst.d = load ptr, ptr %dst.d.p
  %src.a.p = {_word(1, "%src.d")}
  %src.a = load ptr, ptr %src.a.p
  %dst.a.p = {_word(1, "%dst.d")}
  %dst.a = load ptr, ptr %dst.a.p
  %src.o.p = {_word(2, "%src.d")}
  %src.o = load i64, ptr %src.o.p
  %dst.o.p = {_word(2, "%dst.d")}
  %dst.o = load i64, ptr %dst.o.p
  %src.b = mul i64 %src.o, %item
  %dst.b = mul i64 %dst.o, %item
  %src = getelementptr i8, ptr %src.a, i64 %src.b
  %dst = getelementptr i8, ptr %dst.a, i64 %dst.b
  %sizes = {_word(3, "%src.d")}
  %src.st = getelementptr i64, ptr %sizes, i64 %rank
  %dst.sizes = {_word(3, "%dst.d")}
  %dst.st = getelementptr i64, ptr %dst.sizes, i64 %rank
  br label %empty.head
empty.head:
  %e = phi i64 [ 0, %entry ], [ %e.next, %empty.body ]
  %e.more = icmp ult i64 %e, %rank
  br i1 %e.more, label %empty.body, label %begin
empty.body:
  %e.p = getelementptr i64, ptr %sizes, i64 %e
  %e.size = load i64, ptr %e.p
  %e.next = add i64 %e, 1
  %e.none = icmp sle i64 %e.size, 0
  br i1 %e.none, label %end, label %empty.head
begin:
  call void @hal_copies(ptr %src, i64 0)
  call void @hal_copies(ptr %dst, i64 {WRITE})
  %scalar = icmp eq i64 %rank, 0
  br i1 %scalar, label %one, label %inner
one:
  call void @hal_row(ptr %dst, ptr %src, i64 %item)
  br label %end
inner:
  %last = sub i64 %rank, 1
  %last.size.p = getelementptr i64, ptr %sizes, i64 %last
  %last.size = load i64, ptr %last.size.p
  %last.src.p = getelementptr i64, ptr %src.st, i64 %last
  %last.src = load i64, ptr %last.src.p
  %last.dst.p = getelementptr i64, ptr %dst.st, i64 %last
  %last.dst = load i64, ptr %last.dst.p
  %src.unit = icmp eq i64 %last.src, 1
  %dst.unit = icmp eq i64 %last.dst, 1
  %unit = and i1 %src.unit, %dst.unit
  %row = mul i64 %last.size, %item
  %bytes = select i1 %unit, i64 %row, i64 %item
  %outer = select i1 %unit, i64 %last, i64 %rank
  br label %copy
copy:
  %src.off = phi i64 [ 0, %inner ], [ %src.to, %step ]
  %dst.off = phi i64 [ 0, %inner ], [ %dst.to, %step ]
  %src.by = mul i64 %src.off, %item
  %dst.by = mul i64 %dst.off, %item
  %src.at = getelementptr i8, ptr %src, i64 %src.by
  %dst.at = getelementptr i8, ptr %dst, i64 %dst.by
  call void @hal_row(ptr %dst.at, ptr %src.at, i64 %bytes)
  %failed = call i1 @hal_failed()
  br i1 %failed, label %end, label %carry
carry:
  %d = phi i64 [ %outer, %copy ], [ %d.1, %wrap ]
  %src.now = phi i64 [ %src.off, %copy ], [ %src.back, %wrap ]
  %dst.now = phi i64 [ %dst.off, %copy ], [ %dst.back, %wrap ]
  %done = icmp eq i64 %d, 0
  br i1 %done, label %end, label %advance
advance:
  %d.1 = sub i64 %d, 1
  %i.p = getelementptr i64, ptr %index, i64 %d.1
  %i = load i64, ptr %i.p
  %i.next = add i64 %i, 1
  %n.p = getelementptr i64, ptr %sizes, i64 %d.1
  %n = load i64, ptr %n.p
  %ss.p = getelementptr i64, ptr %src.st, i64 %d.1
  %ss = load i64, ptr %ss.p
  %ds.p = getelementptr i64, ptr %dst.st, i64 %d.1
  %ds = load i64, ptr %ds.p
  %src.to = add i64 %src.now, %ss
  %dst.to = add i64 %dst.now, %ds
  %fits = icmp slt i64 %i.next, %n
  br i1 %fits, label %step, label %wrap
step:
  store i64 %i.next, ptr %i.p
  br label %copy
wrap:
  store i64 0, ptr %i.p
  %src.span = mul i64 %n, %ss
  %src.back = sub i64 %src.to, %src.span
  %dst.span = mul i64 %n, %ds
  %dst.back = sub i64 %dst.to, %dst.span
  br label %carry
end:
  ret void
}}

; fp32 -> bf16 to nearest even, NaN kept quiet. Not every C library has it.
define linkonce_odr bfloat @__truncsfbf2(float %x) {{
  %b = bitcast float %x to i32
  %nan = fcmp uno float %x, %x
  %odd.s = lshr i32 %b, 16
  %odd = and i32 %odd.s, 1
  %r = add i32 %b, 32767
  %rounded = add i32 %r, %odd
  %quiet = or i32 %b, 4194304
  %chosen = select i1 %nan, i32 %quiet, i32 %rounded
  %hi = lshr i32 %chosen, 16
  %h = trunc i32 %hi to i16
  %y = bitcast i16 %h to bfloat
  ret bfloat %y
}}
@llvm.used = appending global [1 x ptr] [ptr @__truncsfbf2], section "llvm.metadata"
"""
"""The runtime that every kernel is compiled with."""

AT_UNTRACED = """
define internal ptr @hal_at(ptr %p, i64 %size, i64 %access) alwaysinline {
  ret ptr %p
}
define internal void @hal_copies(ptr %p, i64 %access) alwaysinline {
  ret void
}
"""

AT = f"""
define internal ptr @hal_at(ptr %p, i64 %size, i64 %access) alwaysinline {{
  %a = ptrtoint ptr %p to i64
  %top = lshr i64 %a, 62
  %handle = icmp eq i64 %top, 1
  br i1 %handle, label %far, label %near
near:
  %s = load ptr, ptr @hal_s
  %lo.p = {_word(ARENA)}
  %lo = load i64, ptr %lo.p
  %hi.p = {_word(ARENA_END)}
  %hi = load i64, ptr %hi.p
  %into = sub i64 %a, %lo
  %span = sub i64 %hi, %lo
  %room = sub i64 %span, %size
  %fine = icmp ule i64 %into, %room
  br i1 %fine, label %same, label %other
same:
  ret ptr %p
other:
  %q = call ptr @hal_other(ptr %p, i64 %size, i64 %access)
  ret ptr %q
far:
  %r = call ptr @hal_far(ptr %p, i64 %size, i64 %access)
  ret ptr %r
}}

define internal ptr @hal_other(ptr %p, i64 %size, i64 %access) noinline {{
  %a = ptrtoint ptr %p to i64
  %constant = call i1 @hal_constant(i64 %a)
  br i1 %constant, label %same, label %fail
same:
  ret ptr %p
fail:
  call void @hal_fail(i64 {WILD}, i64 0, i64 %a, i64 %size, i64 %access, i64 0)
  %sink = call ptr @hal_sink(i64 %access)
  ret ptr %sink
}}

define internal ptr @hal_entry(ptr %p) {{
  %s = load ptr, ptr @hal_s
  %a = ptrtoint ptr %p to i64
  %high = lshr i64 %a, {ARG_SHIFT}
  %arg = and i64 %high, 16383
  %words = mul i64 %arg, {ARG_WORDS}
  %first = add i64 %words, {FIRST_ARG}
  %n.p = {_word(ARGS)}
  %n = load i64, ptr %n.p
  %known = icmp ult i64 %arg, %n
  %e = getelementptr i64, ptr %s, i64 %first
  %out = select i1 %known, ptr %e, ptr null
  ret ptr %out
}}

define internal void @hal_copies(ptr %p, i64 %access) {{
  %a = ptrtoint ptr %p to i64
  %top = lshr i64 %a, 62
  %handle = icmp eq i64 %top, 1
  br i1 %handle, label %look, label %end
look:
  %e = call ptr @hal_entry(ptr %p)
  %none = icmp eq ptr %e, null
  br i1 %none, label %end, label %add
add:
  %which = add i64 %access, {COPIES}
  %count.p = getelementptr i64, ptr %e, i64 %which
  %count = load i64, ptr %count.p
  %more = add i64 %count, 1
  store i64 %more, ptr %count.p
  br label %end
end:
  ret void
}}

define internal ptr @hal_far(ptr %p, i64 %size, i64 %access) noinline {{
entry:
  %s = load ptr, ptr @hal_s
  %a = ptrtoint ptr %p to i64
  %e = call ptr @hal_entry(ptr %p)
  %none = icmp eq ptr %e, null
  br i1 %none, label %wild, label %look
wild:
  %w = call ptr @hal_other(ptr %p, i64 %size, i64 %access)
  ret ptr %w
look:
  %high = lshr i64 %a, {ARG_SHIFT}
  %arg = and i64 %high, 16383
  %low = and i64 %a, {(1 << ARG_SHIFT) - 1}
  %off = sub i64 %low, {BIAS}
  %extent.p = {_word(EXTENT, "%e")}
  %extent = load i64, ptr %extent.p
  %stop = add i64 %off, %size
  %before = icmp slt i64 %off, 0
  %past = icmp sgt i64 %stop, %extent
  %outside = or i1 %before, %past
  br i1 %outside, label %bad, label %inside
bad:
  call void @hal_fail(i64 {BOUNDS}, i64 %arg, i64 %off, i64 %size, i64 %access, i64 0)
  %sink = call ptr @hal_sink(i64 %access)
  ret ptr %sink
inside:
  %dims.p = {_word(DIMS, "%e")}
  %dims = load i64, ptr %dims.p
  %dense = icmp eq i64 %dims, 0
  br i1 %dense, label %count, label %gap
gap:
  %d = phi i64 [ 0, %inside ], [ %d.next, %gap.next ]
  %rem = phi i64 [ %off, %inside ], [ %rem.next, %gap.next ]
  %two = mul i64 %d, 2
  %dim.i = add i64 %two, {DIM0}
  %dim.p = getelementptr i64, ptr %e, i64 %dim.i
  %dim = load i64, ptr %dim.p
  %stride.i = add i64 %two, {DIM0 + 1}
  %stride.p = getelementptr i64, ptr %e, i64 %stride.i
  %stride = load i64, ptr %stride.p
  %at = udiv i64 %rem, %stride
  %rem.next = urem i64 %rem, %stride
  %in = icmp ult i64 %at, %dim
  br i1 %in, label %gap.next, label %bad
gap.next:
  %d.next = add i64 %d, 1
  %again = icmp ult i64 %d.next, %dims
  br i1 %again, label %gap, label %gap.end
gap.end:
  %inner.p = {_word(INNER, "%e")}
  %inner = load i64, ptr %inner.p
  %inner.stop = add i64 %rem.next, %size
  %whole = icmp ule i64 %inner.stop, %inner
  br i1 %whole, label %count, label %bad
count:
  %kind = and i64 %access, 3
  %count.i = add i64 %kind, {COUNT}
  %count.p = getelementptr i64, ptr %e, i64 %count.i
  %count.v = load i64, ptr %count.p
  %count.n = add i64 %count.v, 1
  store i64 %count.n, ptr %count.p
  %bytes.i = add i64 %kind, {BYTES}
  %bytes.p = getelementptr i64, ptr %e, i64 %bytes.i
  %bytes.v = load i64, ptr %bytes.p
  %bytes.n = add i64 %bytes.v, %size
  store i64 %bytes.n, ptr %bytes.p
  %base.p = {_word(BASE, "%e")}
  %base = load ptr, ptr %base.p
  %real = getelementptr i8, ptr %base, i64 %off
  br label %shadow
shadow:
  %writers.p = {_word(WRITERS, "%e")}
  %writers = load ptr, ptr %writers.p
  %readers.p = {_word(READERS, "%e")}
  %readers = load ptr, ptr %readers.p
  %shared.p = {_word(SHARED, "%e")}
  %shared.v = load i64, ptr %shared.p
  %shared = icmp ne i64 %shared.v, 0
  %program.p = {_word(PROGRAM)}
  %program.w = load i64, ptr %program.p
  %me = trunc i64 %program.w to i32
  %write.v = and i64 %access, {WRITE}
  %write = icmp ne i64 %write.v, 0
  br label %byte
byte:
  %b = phi i64 [ 0, %shadow ], [ %b.next, %byte.next ]
  %where = add i64 %off, %b
  %w.p = getelementptr i32, ptr %writers, i64 %where
  %r.p = getelementptr i32, ptr %readers, i64 %where
  %wr = load i32, ptr %w.p
  %rd = load i32, ptr %r.p
  %wr.none = icmp eq i32 %wr, 0
  %wr.me = icmp eq i32 %wr, %me
  %wr.fine = or i1 %wr.none, %wr.me
  %wr.other = xor i1 %wr.fine, true
  %rd.none = icmp eq i32 %rd, 0
  %rd.me = icmp eq i32 %rd, %me
  %rd.fine = or i1 %rd.none, %rd.me
  %rd.other = xor i1 %rd.fine, true
  br i1 %write, label %writing, label %reading
writing:
  %wr.now = select i1 %wr.fine, i32 %me, i32 -1
  store i32 %wr.now, ptr %w.p
  %ww = select i1 %shared, i1 false, i1 %wr.other
  %w.race = or i1 %ww, %rd.other
  %w.who = select i1 %ww, i32 %wr, i32 %rd
  br label %judge
reading:
  %rd.now = select i1 %rd.fine, i32 %me, i32 -1
  store i32 %rd.now, ptr %r.p
  br label %judge
judge:
  %race = phi i1 [ %w.race, %writing ], [ %wr.other, %reading ]
  %who = phi i32 [ %w.who, %writing ], [ %wr, %reading ]
  br i1 %race, label %racing, label %byte.next
racing:
  %who.w = sext i32 %who to i64
  call void @hal_fail(i64 {RACE}, i64 %arg, i64 %where, i64 1, i64 %access, i64 %who.w)
  br label %byte.next
byte.next:
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %b.next, %size
  br i1 %b.more, label %byte, label %end
end:
  ret ptr %real
}}
"""
