"""Lowers a Triton kernel for Ascend, with Ascend's own compiler, as far as LLVM IR that a CPU can run.

    Python source -> ttir -> linalg ("ttadapter")    triton-ascend, as on the device
                  -> LLVM dialect                    bishengir-opt
                  -> LLVM IR                         libtriton

No driver and no CANN. The linalg is what `hal.lowered.compile` hands to the device's back end, so what
runs here and what is compiled part only there. Everything is kept on disk, by the kernel's source, what
it was specialised on, and the tools.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.lowered import loops, pins, toolchain
from hal.lowered.errors import LoweringError

ARCH = "Ascend910B3"

BUFFERIZE = (
    "--convert-elementwise-to-linalg",
    # One loop for a chain of elementwise operations: the same sums, without the buffers between them.
    "--linalg-generalize-named-ops",
    "--linalg-fuse-elementwise-ops",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    # Without it every iteration of a token loop would keep its buffers until the program ends.
    "--buffer-deallocation-pipeline",
    "--convert-bufferization-to-memref",
)
TO_LLVM = (
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-arith-to-llvm",
    "--convert-math-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
"""Between the two, `loops` orders the loops, and `pins.pin` says which are over whole buffers."""


@dataclass(frozen=True)
class Lowered:
    """A kernel, lowered for one specialisation.

    Attributes:
        name: the kernel's name.
        args: names of the parameters that are still arguments, in order (constants are compiled in).
        types: Triton's types of them: ``*bf16``, ``i32``, ...
        constants: what was compiled in, by name.
        ttadapter: the linalg IR that the device's compiler gets.
        llvm: the LLVM IR.
        key: the name in the cache.
    """

    name: str
    args: tuple[str, ...]
    types: tuple[str, ...]
    constants: Mapping[str, Any]
    ttadapter: str = field(repr=False)
    llvm: str = field(repr=False)
    key: str


_lowered: dict[Any, tuple[Lowered, tuple[int, ...]]] = {}
"""By kernel and classes of its arguments: the form, and which of the arguments it still takes."""
_lock = threading.Lock()


def lower(
    jit_fn: Any, args: Sequence[Any], constexprs: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Lowered:
    """Lower `jit_fn` for these arguments.

    Args:
        jit_fn: triton-ascend's ``JITFunction`` (what ``triton.jit`` returns).
        args: the arguments of all parameters that are not constexpr, in order: tensors, ints, floats,
            bools or None.
        constexprs: the constexpr parameters by name; those left out take their defaults.
        options: compile options of triton-ascend; those of other targets (``num_warps``) are ignored, as
            it ignores them.

    Raises:
        ToolchainError: the tools are not here.
        LoweringError: the compiler refused the kernel.
        TypeError: an argument is missing or too many.
    """
    return find(jit_fn, args, constexprs, options)[0]


def find(
    jit_fn: Any, args: Sequence[Any], constexprs: Mapping[str, Any], options: Mapping[str, Any] | None
) -> tuple[Lowered, tuple[int, ...]]:
    """What `lower` gives, and the places of those of `args` that it still takes."""
    key = (
        jit_fn,
        len(args),
        repr(constexprs),
        repr(options),
        *map(type, constexprs.values()),
        *[
            "i32" if p[3] and v.__class__ is int and -(2**31) <= v < 2**31 else _class_of(p, v)
            for p, v in zip(_arguments(jit_fn), args, strict=False)
        ],
    )
    found = _lowered.get(key)
    if found is None:
        toolchain.require()
        values = _bind(jit_fn, args, constexprs)
        with _lock:
            found = _lowered.get(key)
            if found is None:
                lowered = _from_disk(jit_fn, values, dict(options or {}))
                names = [p.name for p in jit_fn.params if not p.is_constexpr]
                taken = tuple(i for i, n in enumerate(names) if n not in lowered.constants)
                found = _lowered[key] = lowered, taken
    return found


@functools.lru_cache(maxsize=1024)
def _arguments(jit_fn: Any) -> list[tuple[str, str, bool, bool]]:
    """Name, annotated type and specialisation of each parameter that is no constexpr, and whether it has neither."""
    found = [(p.name, p.annotation_type, not p.do_not_specialize) for p in jit_fn.params if not p.is_constexpr]
    return [(*p, not p[1] and not p[2]) for p in found]


def _bind(jit_fn: Any, args: Sequence[Any], constexprs: Mapping[str, Any]) -> list[Any]:
    given = dict(constexprs)
    left = list(args)
    values = []
    for p in jit_fn.params:
        if not p.is_constexpr:
            if not left:
                raise TypeError(f"hal: kernel {jit_fn.__name__}: no argument for parameter {p.name}")
            values.append(left.pop(0))
        elif p.name in given:
            values.append(given.pop(p.name))
        elif p.has_default:
            values.append(p.default)
        else:
            raise TypeError(f"hal: kernel {jit_fn.__name__}: no value for constexpr {p.name}")
    if left or given:
        extra = sorted(given) if given else f"{len(left)} arguments"
        raise TypeError(f"hal: kernel {jit_fn.__name__}: too much given: {extra}")
    return values


def _class_of(param: tuple[str, str, bool, bool], value: Any) -> Any:
    """All that the compiled form depends on, of one argument."""
    name, annotation, specialize, _ = param
    if value is None:
        return None
    if hasattr(value, "data_ptr"):
        return value.dtype, specialize and value.data_ptr() % 16 == 0
    kind = annotation or _scalar(name, value)
    if isinstance(value, int) and not isinstance(value, bool) and specialize:
        return kind, value == 1, value % 16 == 0
    return kind


def _scalar(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if -(2**63) <= value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"hal: parameter {name}: a tensor, int, float, bool or None; got {type(value).__name__}")


def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


def _frozen(options: Mapping[str, Any] | None) -> tuple[Any, ...]:
    return tuple(sorted((k, repr(v)) for k, v in (options or {}).items()))


def _from_disk(jit_fn: Any, values: Sequence[Any], options: dict[str, Any]) -> Lowered:
    from triton.backends.ascend.compiler import AscendAttrsDescriptor
    from triton.runtime.jit import mangle_type

    attrs = AscendAttrsDescriptor(jit_fn.params, values)
    signature, constants = {}, {}
    ones = attrs.get_constants()
    for p, v in zip(jit_fn.params, values, strict=True):
        if not p.is_constexpr:
            signature[p.name] = p.annotation_type or mangle_type(v, p.is_const)
        if p.is_constexpr or v is None or p.num in ones:
            constants[p.name] = v
    args = tuple(n for n in signature if n not in constants)
    parts = (
        toolchain.fingerprint(),
        BUFFERIZE,
        TO_LLVM,
        *map(_text, (loops.__file__, pins.__file__)),
        ARCH,
        jit_fn.cache_key,
        signature,
        attrs.hash(),
        _frozen(options),
        [(k, type(v).__name__, repr(v)) for k, v in constants.items()],
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    path = toolchain.cache_dir() / key[:2] / f"{key}.json"
    try:
        kept = json.loads(path.read_text())
        ttadapter, llvm = kept["ttadapter"], kept["llvm"]
    except (OSError, ValueError, KeyError):
        ttadapter, llvm = _compile(jit_fn, signature, constants, attrs, options)
        kept = {"kernel": jit_fn.__name__, "ttadapter": ttadapter, "llvm": llvm}
        toolchain.keep(path, json.dumps(kept).encode())
    types = tuple(signature[n] for n in args)
    return Lowered(jit_fn.__name__, args, types, constants, ttadapter, llvm, key)


def _compile(
    jit_fn: Any, signature: dict[str, str], constants: dict[str, Any], attrs: Any, options: dict[str, Any]
) -> tuple[str, str]:
    from triton._C.libtriton import ir, llvm
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    name = jit_fn.__name__
    target = GPUTarget("npu", ARCH, 0)
    backend = make_backend(target)
    opts = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, opts)
    meta = {"target": target, **opts.__dict__}
    source = ASTSource(jit_fn, signature, constants, attrs)
    module = source.make_ir(opts, backend.get_codegen_implementation(), backend.get_module_map(), context)
    ttir = stages["ttir"](module, meta)
    try:
        ttadapter: str = stages["ttadapter"](ttir, meta)
    except subprocess.CalledProcessError as e:
        raise LoweringError(name, "triton-adapter-opt", (e.stderr or b"").decode(errors="replace")) from None
    with tempfile.TemporaryDirectory(prefix="hal-lowered-") as folder:
        source, buffers, dialect = (Path(folder, f"{n}.mlir") for n in ("kernel", "buffers", "llvm"))
        source.write_text(loops.apart(ttadapter))
        _opt(name, source, BUFFERIZE, buffers)
        buffers.write_text(pins.pin(loops.order_loops(buffers.read_text())))
        _opt(name, buffers, TO_LLVM, dialect)
        fresh = ir.context()
        ir.load_dialects(fresh)
        parsed = ir.parse_mlir_module(str(dialect), fresh)
        parsed.context = fresh
        try:
            text = str(llvm.to_module(parsed, llvm.context()))
        except RuntimeError as e:
            raise LoweringError(name, "translation to LLVM IR", str(e)) from None
    return ttadapter, text


def _opt(kernel: str, module: Path, passes: tuple[str, ...], out: Path) -> None:
    ran = subprocess.run(
        [str(toolchain.bishengir("bishengir-opt")), str(module), *passes, "-o", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise LoweringError(kernel, "bishengir-opt", ran.stderr)
