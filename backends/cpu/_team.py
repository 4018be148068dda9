"""What CPU kernels need to run on several threads: a counter that they share, calls of compiled code by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from hal.backends.cpu._bits import F32, I8, I32, I64, POINTER, types, types_of


@intrinsic  # type: ignore[untyped-decorator]
def take(typingctx: Any, counter: Any, step: Any) -> Any:
    """Adds `step` to the counter that threads share; its value before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", args[0], args[1], "seq_cst")

    return types.int64(POINTER["i64"], types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def peek(typingctx: Any, counter: Any) -> Any:
    """The counter that threads share, as it is now."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(args[0], "seq_cst", 8)

    return types.int64(POINTER["i64"]), codegen


@intrinsic  # type: ignore[untyped-decorator]
def swap(typingctx: Any, counter: Any, value: Any) -> Any:
    """The counter that threads share becomes `value`; its value before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", args[0], args[1], "seq_cst")

    return types.int64(POINTER["i64"], types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def claim(typingctx: Any, counter: Any, seen: Any) -> Any:
    """Whether the counter that threads share was still `seen`; it is one less then."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        done = b.cmpxchg(args[0], args[1], b.sub(args[1], I64(1)), "seq_cst", "seq_cst")
        return b.extract_value(done, 1)

    return types.boolean(POINTER["i64"], types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def spread(typingctx: Any, block: Any, words: Any) -> Any:
    """Calls the compiled function whose address is at `block` with the arguments that follow. Whether it failed.

    `words`, a literal, names their types as `Kernel` does; each takes eight bytes.
    """
    if not isinstance(words, types.StringLiteral):
        raise TypingError("the types must be a literal")
    kinds = types_of(words.literal_value.split())

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values = []
        for i, kind in enumerate(kinds):
            where = b.gep(args[0], [I64(i + 1)])
            if kind is types.float32:
                values.append(b.load(b.bitcast(where, F32.as_pointer())))
            elif kind is types.boolean:
                values.append(b.icmp_signed("!=", b.load(where), I64(0)))
            elif kind is types.int64:
                values.append(b.load(where))
            else:
                values.append(b.inttoptr(b.load(where), context.get_value_type(kind)))
        convention = context.call_conv
        target = b.inttoptr(b.load(args[0]), convention.get_function_type(types.none, kinds).as_pointer())
        status, _ = convention.call_function(b, target, types.none, kinds, values)
        return status.is_error

    return types.boolean(POINTER["i64"], words), codegen


@intrinsic  # type: ignore[untyped-decorator]
def invoke(typingctx: Any, address: Any, block: Any) -> Any:
    """Calls the compiled function of one pointer at `address`, which returns a bool, with `block`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        convention, kind = context.call_conv, (POINTER["i64"],)
        target = b.inttoptr(args[0], convention.get_function_type(types.boolean, kind).as_pointer())
        _, failed = convention.call_function(b, target, types.boolean, kind, [args[1]])
        return failed

    return types.boolean(types.int64, POINTER["i64"]), codegen


@intrinsic  # type: ignore[untyped-decorator]
def in_team(typingctx: Any, parallel: Any, threads: Any, address: Any, block: Any) -> Any:
    """`invoke` in each of so many threads at once, by OpenMP: `parallel` is where its ``GOMP_parallel`` lies.

    That takes a function of one pointer in C's calling convention; it is made here, and given these three words.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        raw, words = I8.as_pointer(), ir.ArrayType(I64, 3)
        convention, kind = context.call_conv, (POINTER["i64"],)
        body = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [raw]), f"{b.function.name}.in_team")
        body.linkage = "internal"
        inner = ir.IRBuilder(body.append_basic_block())
        given = inner.bitcast(body.args[0], words.as_pointer())
        at = [inner.gep(given, [I32(0), I32(i)]) for i in range(3)]
        target = inner.inttoptr(inner.load(at[0]), convention.get_function_type(types.boolean, kind).as_pointer())
        argument = inner.inttoptr(inner.load(at[1]), I64.as_pointer())
        _, failed = convention.call_function(inner, target, types.boolean, kind, [argument])
        with inner.if_then(failed):
            inner.store(I64(1), at[2])
        inner.ret_void()

        mine = cgutils.alloca_once(b, words)
        places = [b.gep(mine, [I32(0), I32(i)]) for i in range(3)]
        for place, value in zip(places, (args[2], b.ptrtoint(args[3], I64), I64(0)), strict=True):
            b.store(value, place)
        start = ir.FunctionType(ir.VoidType(), [body.type, raw, I32, I32])
        b.call(b.inttoptr(args[0], start.as_pointer()), [body, b.bitcast(mine, raw), b.trunc(args[1], I32), I32(0)])
        return b.icmp_signed("!=", b.load(places[2]), I64(0))

    return types.boolean(types.int64, types.int64, types.int64, POINTER["i64"]), codegen
