"""Numbers as bits: pointers that know their format, for CPU kernels.

numba has no bf16, fp16 or fp8 on the CPU. Here a pointer's type carries the format: `load` gives fp32 (or
int64 for the integer formats) and `store` rounds to nearest even, once, keeping NaN; fp8 saturates. All
of it is branch-free integer code that LLVM vectorises, so nothing depends on fastmath, which would be
free to drop NaN and Inf.

An entry point takes addresses as plain ints (``Tensor.data_ptr()``) where its signature says `Pointer`:
about 50 ns each, where a ``.numpy()`` view costs 4 us.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils
from numba.core import types as _types
from numba.core.datamodel import models
from numba.core.errors import TypingError
from numba.extending import NativeValue, intrinsic, register_model, unbox

types: Any = _types  # half of its names are made at run time, where mypy sees none
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class Format(NamedTuple):
    """How many bits a format has, and for the small floats how they are split."""

    bits: int
    mantissa: int = 0
    bias: int = 0
    top: int = 0
    """The bits that a finite value too large for the format becomes (Inf, or the largest: saturating)."""
    limit: int = 0
    """fp32 bits of the smallest magnitude that becomes `top`."""


FORMATS = {
    "u8": Format(8),
    "i32": Format(32),
    "i64": Format(64),
    "fp32": Format(32),
    "bf16": Format(16),
    "fp16": Format(16),  # by the CPU's own conversions
    "fp16_bits": Format(16, 10, 15, 0x7C00, 0x477FF000),
    "e4m3": Format(8, 3, 7, 0x7E, 0x43E00000),
    "e5m2": Format(8, 2, 15, 0x7B, 0x47600000),
}
NAN = {"fp16_bits": 0x7E00, "e4m3": 0x7F, "e5m2": 0x7F}


def _converts_fp16() -> bool:
    # Elsewhere LLVM calls a helper that numba does not link.
    if platform.machine() in ("aarch64", "arm64"):
        return True
    return bool(llvm.get_host_cpu_features().get("f16c", False))


HALF = "fp16" if _converts_fp16() else "fp16_bits"
"""The format name that fp16 tensors go by on this CPU."""


class Pointer(types.Type):  # type: ignore[misc]
    """A pointer to elements of one of `FORMATS`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(name=f"hal.Pointer({kind})")

    @property
    def element(self) -> Any:
        return types.int64 if self.kind in ("u8", "i32", "i64") else types.float32


POINTER = {kind: Pointer(kind) for kind in FORMATS}


def types_of(words: list[str]) -> list[Any]:
    """The types that words name: ``int``, ``float``, ``double``, ``bool``, ``object``, and formats for pointers."""
    scalars = {
        "int": types.int64, "float": types.float32, "double": types.float64, "bool": types.boolean, "object": OBJECT
    }  # fmt: skip
    return [scalars.get(w) or POINTER[w] for w in words]


class Object(types.Type):  # type: ignore[misc]
    """Where a Python object lies, as a word; 0 for None."""


OBJECT = Object("hal.Object")


@register_model(Object)
class _ObjectModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Object) -> None:
        super().__init__(dmm, fe_type, I64)


@unbox(Object)  # type: ignore[untyped-decorator]
def _where(typ: Object, obj: Any, c: Any) -> NativeValue:
    none = c.builder.icmp_unsigned("==", obj, c.pyapi.borrow_none())
    return NativeValue(c.builder.select(none, I64(0), c.builder.ptrtoint(obj, I64)))


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Pointer) -> None:
        super().__init__(dmm, fe_type, ir.IntType(FORMATS[fe_type.kind].bits).as_pointer())


@unbox(Pointer)  # type: ignore[untyped-decorator]
def _from_int(typ: Pointer, obj: Any, c: Any) -> NativeValue:
    raw = c.pyapi.long_as_voidptr(obj)
    return NativeValue(c.builder.bitcast(raw, c.context.get_value_type(typ)), is_error=c.pyapi.c_api_error())


# --- what kernels call ------------------------------------------------------------------------------


def _pointers(*args: Any) -> None:
    for a in args:
        if not isinstance(a, Pointer):
            raise TypingError(f"a hal Pointer is needed, not {a}")


@intrinsic  # type: ignore[untyped-decorator]
def load(typingctx: Any, p: Any, i: Any) -> Any:
    """Element i of p, as fp32 or int64."""
    _pointers(p)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return decode(b, p.kind, b.load(b.gep(args[0], [args[1]])))

    return p.element(p, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typingctx: Any, p: Any, i: Any, x: Any) -> Any:
    """Element i of p becomes x, rounded to p's format."""
    _pointers(p)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(encode(b, p.kind, args[2]), b.gep(args[0], [args[1]]))

    return types.void(p, types.int64, p.element), codegen


@intrinsic  # type: ignore[untyped-decorator]
def shift(typingctx: Any, p: Any, i: Any) -> Any:
    """p + i elements."""
    _pointers(p)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.gep(args[0], [args[1]])

    return p(p, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def cast(typingctx: Any, p: Any, kind: Any) -> Any:
    """p as a pointer of another format: a literal name, or a pointer that has it."""
    _pointers(p)
    if not isinstance(kind, Pointer | types.StringLiteral):  # numba asks without the literal first
        raise TypingError("the format must be a pointer's or a literal")
    to = kind if isinstance(kind, Pointer) else POINTER[kind.literal_value]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], context.get_value_type(to))

    return to(p, kind), codegen


@intrinsic  # type: ignore[untyped-decorator]
def view(typingctx: Any, address: Any, kind: Any) -> Any:
    """The int `address` as a pointer of the format that the literal string `kind` names."""
    if not isinstance(kind, types.StringLiteral):
        raise TypingError("the format must be a literal")
    p = POINTER[kind.literal_value]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(p))

    return p(types.int64, kind), codegen


@intrinsic  # type: ignore[untyped-decorator]
def address(typingctx: Any, p: Any) -> Any:
    """The inverse of `view`."""
    _pointers(p)
    return types.int64(p), lambda context, b, signature, args: b.ptrtoint(args[0], I64)


@intrinsic  # type: ignore[untyped-decorator]
def move(typingctx: Any, dst: Any, src: Any, n: Any) -> Any:
    """Copies `n` elements of src's format, bit for bit."""
    _pointers(dst, src)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        void = I8.as_pointer()
        cgutils.raw_memcpy(b, b.bitcast(args[0], void), b.bitcast(args[1], void), args[2], FORMATS[src.kind].bits // 8)

    return types.void(dst, src, types.int64), codegen


LINE = 64
"""Bytes that `stream_line` copies."""


@intrinsic  # type: ignore[untyped-decorator]
def stream_line(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copies `LINE` bytes past the caches, where the CPU can; `dst` is a multiple of as many. `fence` ends a series."""
    _pointers(dst, src)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(I64, LINE // 8).as_pointer()
        put = b.store(b.load(b.bitcast(args[1], line), align=1), b.bitcast(args[0], line), align=LINE)
        put.set_metadata("nontemporal", b.module.add_metadata([I32(1)]))

    return types.void(dst, src), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fence(typingctx: Any) -> Any:
    """What was streamed before it is seen by other threads before what is stored after it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        # Elsewhere the caller's own synchronisation orders such stores like any other.
        if platform.machine() in ("x86_64", "AMD64"):
            b.call(
                cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"), []
            )

    return types.void(), codegen


# --- conversions, as LLVM IR: of one element, or of a vector of them ---------------------------------


def wide(scalar: Any, like: Any) -> Any:
    """The LLVM type `scalar`, or a vector of it where the value `like` is a vector."""
    return ir.VectorType(scalar, like.type.count) if isinstance(like.type, ir.VectorType) else scalar


def constant(scalar: Any, value: Any, like: Any) -> Any:
    """A constant of that type."""
    kind = wide(scalar, like)
    return ir.Constant(kind, [scalar(value)] * kind.count if kind is not scalar else value)


def decode(b: Any, kind: str, raw: Any) -> Any:
    """The bits of a format -> fp32, or int64 for the integer formats."""
    if kind in ("fp32", "i64"):
        return b.bitcast(raw, wide(F32, raw)) if kind == "fp32" else raw
    if kind == "i32":
        return b.sext(raw, I64)
    if kind == "u8":
        return b.zext(raw, I64)
    if kind == "fp16":
        return b.fpext(b.bitcast(raw, wide(F16, raw)), wide(F32, raw))

    def i(value: int) -> Any:
        return constant(I32, value, raw)

    fp32, bits = wide(F32, raw), b.zext(raw, wide(I32, raw))
    if kind == "bf16":
        return b.bitcast(b.shl(bits, i(16)), fp32)
    if kind != "fp16_bits":
        raise TypingError(f"kernels never read {kind}")
    # Placing the exponent 112 too low and multiplying by 2^112 is exact, subnormals included.
    sign = b.shl(b.and_(bits, i(0x8000)), i(16))
    rest = b.shl(b.and_(bits, i(0x7FFF)), i(13))
    scaled = b.bitcast(b.fmul(b.bitcast(rest, fp32), constant(F32, 2.0**112, raw)), bits.type)
    special = b.icmp_unsigned(">=", rest, i(0x7C00 << 13))
    magnitude = b.select(special, b.or_(rest, i(0x7F800000)), scaled)
    return b.bitcast(b.or_(sign, magnitude), fp32)


def encode(b: Any, kind: str, x: Any) -> Any:
    """fp32 or int64 -> the bits of a format, to nearest even."""
    if kind in ("fp32", "i64"):
        return b.bitcast(x, wide(I32, x)) if kind == "fp32" else x
    if kind in ("i32", "u8"):
        return b.trunc(x, I32 if kind == "i32" else I8)
    if kind == "fp16":
        return b.bitcast(b.fptrunc(x, wide(F16, x)), wide(I16, x))

    def i(value: int) -> Any:
        return constant(I32, value, x)

    if kind == "bf16":
        near = b.select(b.fcmp_unordered("uno", x, x), i(0x7FC00000), _near_bf16(b, x))
        return b.trunc(b.lshr(near, i(16)), wide(I16, x))
    bits = b.bitcast(x, wide(I32, x))
    nan = b.fcmp_unordered("uno", x, x)
    size = b.and_(bits, i(0x7FFFFFFF))
    f = FORMATS[kind]
    drop = 23 - f.mantissa
    even = b.and_(b.lshr(size, i(drop)), i(1))
    near = b.add(size, b.add(even, i((1 << (drop - 1)) - 1)))
    normal = b.sub(b.lshr(near, i(drop)), i((127 - f.bias) << f.mantissa))
    # Below the smallest normal the format is fixed point: adding the number whose last bit is worth one
    # step lets the FPU round, to even.
    magic = constant(F32, 2.0 ** (24 - f.bias - f.mantissa), x)
    fixed = b.sub(b.bitcast(b.fadd(b.bitcast(size, x.type), magic), bits.type), b.bitcast(magic, bits.type))
    small = b.icmp_unsigned("<", size, i((128 - f.bias) << 23))
    out = b.select(small, fixed, normal)
    out = b.select(b.icmp_unsigned(">=", size, i(f.limit)), i(f.top), out)
    out = b.select(nan, i(NAN[kind]), out)
    sign = b.lshr(b.and_(bits, i(0x80000000)), i(32 - f.bits))
    return b.trunc(b.or_(out, sign), wide(I16 if f.bits == 16 else I8, x))


def _near_bf16(b: Any, x: Any) -> Any:
    """fp32 -> its bits, of which the upper half is the nearest bf16 unless x is NaN; the lower half is anything."""
    bits = b.bitcast(x, wide(I32, x))
    even = b.and_(b.lshr(bits, constant(I32, 16, x)), constant(I32, 1, x))
    return b.add(b.add(bits, constant(I32, 0x7FFF, x)), even)


def split_bf16(b: Any, words: Any) -> tuple[Any, Any]:
    """Words of two bf16 each -> (the first of each, the second of each), as fp32: an instruction each."""
    fp32 = wide(F32, words)
    first = b.shl(words, constant(I32, 16, words))
    return b.bitcast(first, fp32), b.bitcast(b.and_(words, constant(I32, 0xFFFF0000, words)), fp32)


def join_bf16(b: Any, first: Any, second: Any) -> Any:
    """The inverse of `split_bf16`, rounded to nearest even.

    A NaN must have a zero lower half, as those have that come of bf16 numbers and of canonical NaNs: rounding leaves it
    a NaN, where one with all bits set would become -0.
    """
    low = b.lshr(_near_bf16(b, first), constant(I32, 16, first))
    return b.or_(low, b.and_(_near_bf16(b, second), constant(I32, 0xFFFF0000, second)))
