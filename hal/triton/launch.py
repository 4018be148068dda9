"""The one way a Triton kernel is started.

``kernel[grid](...)`` spends 10-16 us of host time per launch, more than most of these kernels run.
Here the compiled kernel is looked up by everything that Triton specialises on, and started through
Triton's own C launcher with the pointers as integers, which spares it a driver query per tensor.

The key of a compiled kernel has two halves. `Kernel.bind` takes the static one: constexprs and compile
options, by value *and* type (``1``, ``True`` and ``1.0`` are equal, and compile differently). A `Launch`
adds the other one at each call: device, every pointer's dtype and 16-byte alignment, every integer's
class (1, divisible by 16, neither) and width (i32, i64, u64 by value), bool, float, None. What an
annotation fixes (``n: tl.int64``) is not keyed, because Triton doesn't look at it either.

Lanes: on a device the above; under TRITON_INTERPRET=1 Triton's interpreter; with HAL_LANE=lowered the
kernel's Ascend IR on the CPU. Kernels and their launchers are the same in all three.

Example:
    >>> @launch.jit(do_not_specialize=("n",))                                    # doctest: +SKIP
    ... def copy(src, dst, n: tl.int64, BLOCK: tl.constexpr): ...
    >>> copy((4,), src, dst, n, BLOCK=1024, num_warps=4)                          # doctest: +SKIP
    >>> fast = copy.bind(BLOCK=1024, num_warps=4); fast((4,), src, dst, n)        # doctest: +SKIP
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sysconfig
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, overload

import torch
import triton

from hal._errors import ArgumentError, HalError

# triton-ascend 3.2 is of an age before `triton.knobs`; no path that it takes needs them.
knobs: Any = getattr(triton, "knobs", None)

TESTED = ((3, 6), (3, 7))
"""Triton versions [first, last) whose C launcher this file knows how to call."""

Grid = tuple[int, ...]


def lane() -> str:
    """How kernels run in this process: ``device``, ``interpreter``, ``lowered``; or ``recorded`` (`hal inspect`)."""
    if Launch.recorder is not None:
        return "recorded"
    return _LANE


def status() -> str:
    """``prebound``, or why launches go through Triton's own path. For `hal info`."""
    if lane() != "device":
        return f"{lane()} lane"
    _helper()
    return _why_not_prebound or (
        f"prebound, in Python: {_why_no_helper}" if _why_no_helper else "prebound, in C"
    )


_INTERPRET = bool(knobs.runtime.interpret) if knobs else os.environ.get("TRITON_INTERPRET") == "1"
_LANE = "lowered" if os.environ.get("HAL_LANE") == "lowered" else "interpreter" if _INTERPRET else "device"
_version = tuple(int(p) for p in triton.__version__.split(".")[:2])
_why_not_prebound = (
    None
    if TESTED[0] <= _version < TESTED[1]
    else f"Triton {triton.__version__} is outside the tested range 3.6: Triton's own launch"
)
if _INTERPRET:
    from hal.triton import interpreter as _interpreter

    _interpreter.install()


@overload
def jit(fn: Callable[..., Any]) -> Kernel: ...
@overload
def jit(
    *, do_not_specialize: Sequence[str] = (), gluon: bool = False
) -> Callable[[Callable[..., Any]], Kernel]: ...
def jit(
    fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = (), gluon: bool = False
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """Make a `Kernel` of a plain Triton function.

    Args:
        fn: the function, when used without arguments.
        do_not_specialize: parameters whose alignment or divisibility must not choose another binary.
        gluon: the function is written in Gluon, which only devices and `hal inspect` understand.
    """
    if fn is None:
        return lambda f: Kernel(f, tuple(do_not_specialize), gluon)
    return Kernel(fn, tuple(do_not_specialize), gluon)


class Kernel:
    """A Triton kernel and all its compiled forms. Made by `jit`; called as ``kernel(grid, *args, **static)``."""

    def __init__(
        self, fn: Callable[..., Any], do_not_specialize: tuple[str, ...], gluon: bool = False
    ) -> None:
        jit = importlib.import_module("triton.experimental.gluon").jit if gluon else triton.jit
        self.jit = jit(fn, do_not_specialize=list(do_not_specialize))
        self.name = fn.__name__
        self.fn = fn
        self.params = _params(fn, do_not_specialize)
        self._bound: dict[Any, Launch] = {}
        _kernels.append(self)

    def __call__(self, grid: Grid, *args: Any, **static: Any) -> None:
        self.bind(**static)(grid, *args)

    def bind(self, **static: Any) -> Launch:
        """The launch of this kernel with these constexprs and compile options, made once and kept."""
        key = tuple(
            (k, v.__class__, repr(v) if v.__class__ is float else v) for k, v in sorted(static.items())
        )
        launch = self._bound.get(key)
        if launch is None:
            launch = self._bound.setdefault(key, Launch(self, static))
        return launch

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


class Launch:
    """A kernel with its constexprs and options fixed; called as ``launch(grid, *args)``.

    ``start`` is the same without a frame in between; it changes with the kinds of the arguments, so read it
    anew for each call. ``compiled`` maps the second half of the key to the compiled kernel.
    """

    recorder: Callable[..., None] | None = None
    """Set by those who want launches handed to them instead of started (``hal inspect``)."""

    def __init__(self, kernel: Kernel, static: dict[str, Any]) -> None:
        self.kernel = kernel
        self.static = static
        names = {p.name for p in kernel.params if p.constexpr}
        self.constexprs = {k: v for k, v in static.items() if k in names}
        self.options = {k: v for k, v in static.items() if k not in names}
        self.args = [p for p in kernel.params if not p.constexpr]
        self.compiled: dict[Any, _Bound] = {}
        self._patterns: dict[str, Callable[..., None]] = {}
        self._keys: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.start: Callable[..., None] = self._first
        mode = lane()
        if self.recorder is not None:
            self.start = self.recorder
        elif mode != "device":
            self.start = self._interpret if mode == "interpreter" else self._lower
        elif knobs is None:
            self.start = self._own
        self.native: Any = None
        if self.start == self._first and (helper := _helper()) is not None:
            params = bytes(1 * p.specialize + 2 * p.typed for p in self.args)
            used = _used_globals(kernel)
            hooks = kernel.jit.pre_run_hooks
            try:
                self.native = helper.Launch(self._slow, params, hooks, _changed if used else None, used)
            except ValueError:  # more arguments than it has room for: by Triton's launcher
                return
            self.start = self.native

    def __call__(self, grid: Grid, *args: Any) -> None:
        self.start(grid, *args)

    def _interpret(self, grid: Grid, *args: Any) -> None:
        with _interpreting:
            self.kernel.jit[grid](*args, **self.constexprs)

    def _lower(self, grid: Grid, *args: Any) -> None:
        lowered = importlib.import_module("hal.lowered")
        lowered.run(self.kernel.jit, grid, args, self.constexprs, self.options)

    def _own(self, grid: Grid, *args: Any) -> None:
        """triton-ascend's own launch, on the current NPU stream."""
        self.kernel.jit[grid](*args, **self.static)

    def _first(self, grid: Grid, *args: Any) -> None:
        """The first call, or one whose arguments are of other kinds than the last: pick the matching fast path."""
        fast = self._patterns[self._pattern(args)]
        if self.native is None:
            self.start = fast
        fast(grid, *args)

    def _slow(self, grid: Grid, *args: Any) -> None:
        """What the native launch leaves to this one, which it knows next time where it can."""
        pattern = self._pattern(args)
        self._patterns[pattern](grid, *args)
        self._teach(self._keys[pattern](*args), args)

    def _teach(self, key: Any, args: Sequence[Any]) -> None:
        bound = self.compiled.get(key)
        if bound is not None and not bound.triton:
            codes = _codes(bound.compiled, self.args)
            warps, ctas, shared = bound.compiled.packed_metadata
            function, cooperative, pdl, *_ = bound.head
            if codes is not None and ctas == 1 and not cooperative:
                self.native.add(tuple(args), function, warps, shared, bool(pdl), codes)

    def triton_launch(self, grid: Grid, *args: Any) -> None:
        """Triton's own launch: with hooks or instrumentation set, and where its internals have moved."""
        device = self._device(args)
        with torch.cuda.device(device):
            self.kernel.jit[grid](*args, **self.static)

    def prepare(self, *args: Any) -> None:
        """Compile, if need be, what a call with such arguments would start; starts nothing."""
        if self.recorder is not None:
            self.recorder((1, 1, 1), *args)
        if lane() != "device" or knobs is None:
            return
        pattern = self._pattern(args)
        key = self._keys[pattern](*args)
        self._compiled(key, args, self._device(args))
        if self.native is not None:
            self._teach(key, args)
        else:
            self.start = self._patterns[pattern]

    def _pattern(self, args: Sequence[Any]) -> str:
        pattern = "".join(map(_kind, self.args, args))
        if len(args) != len(self.args):
            raise TypeError(
                f"hal: kernel {self.kernel.name}: {len(self.args)} arguments expected, {len(args)} given"
            )
        if pattern not in self._patterns:
            self._patterns[pattern], self._keys[pattern] = _generate(self, pattern)
        return pattern

    def _device(self, args: Sequence[Any]) -> int:
        device: int | None = None
        for p, a in zip(self.args, args, strict=True):
            if not hasattr(a, "data_ptr"):
                continue
            here = a.get_device()
            if here < 0 or (device is not None and here != device):
                want = "a CUDA tensor" if device is None else f"a tensor on cuda:{device}, like the others"
                raise ArgumentError(self.kernel.name, p.name, want, f"one on {a.device}")
            device = here
        return torch.cuda.current_device() if device is None else device

    def miss(self, key: Any, grid: Grid, args: Sequence[Any]) -> None:
        """Not compiled yet (or a tensor is on another device than the first): check, compile, launch."""
        device = self._device(args)
        bound = self._compiled(key, args, device)
        if bound.triton:
            self.triton_launch(grid, *args)
            return
        with torch.cuda.device(device):
            pointers = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in args]
            bound.launch(*_grid3(grid), _stream(device), *bound.head, *_place(self, pointers))

    def _compiled(self, key: Any, args: Sequence[Any], device: int) -> _Bound:
        found = self.compiled.get(key)
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise HalError(
                f"hal: kernel {self.kernel.name} would be compiled during graph capture; "
                "run the op once before, or call hal.warmup"
            )
        with self._lock, torch.cuda.device(device):
            if key not in self.compiled:
                self.compiled[key] = _compile(self, args)
            return self.compiled[key]


class _Bound:
    """A compiled kernel, taken apart once: Triton's C launcher and what stands before the arguments."""

    __slots__ = ("compiled", "head", "launch", "triton")

    def __init__(self, compiled: Any) -> None:
        global _why_not_prebound
        self.compiled = compiled
        self.triton = True
        self.launch: Callable[..., None] = _never
        self.head: tuple[Any, ...] = ()
        if _why_not_prebound is not None:
            return
        try:
            run = compiled.run
            if run.global_scratch_size or run.profile_scratch_size:
                return
            launch = run.launch
            self.head = (
                compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
                compiled.packed_metadata, None, None, None,
            )  # fmt: skip
        except AttributeError as moved:
            _why_not_prebound = f"Triton {triton.__version__}: {moved}: Triton's own launch"
            return
        self.launch = launch
        self.triton = False


def _never(*_: Any) -> None:
    raise AssertionError("a kernel that goes through Triton's own launch has no prebound one")


class _Param:
    __slots__ = ("constexpr", "name", "specialize", "typed")

    def __init__(self, name: str, constexpr: bool, typed: bool, specialize: bool) -> None:
        self.name, self.constexpr, self.typed, self.specialize = name, constexpr, typed, specialize


_INTEGERS = {"i1", "u1", *(f"{s}{b}" for s in ("i", "u") for b in (8, 16, 32, 64))}


def _params(fn: Callable[..., Any], frozen: Sequence[str]) -> list[_Param]:
    """What Triton knows of each parameter, from Triton's own reading of the signature."""
    import inspect

    from triton.runtime.jit import KernelParam

    out = []
    for i, (name, p) in enumerate(inspect.signature(fn).parameters.items()):
        if isinstance(p.annotation, str) and p.annotation.startswith("tl."):
            raise HalError(f"hal: kernel {fn.__name__}: postponed annotations hide the types from Triton")
        param = KernelParam(i, p, name in frozen, False)
        typed = param.annotation_type in _INTEGERS
        out.append(_Param(name, param.is_constexpr, typed, name not in frozen))
    unknown = set(frozen) - {p.name for p in out}
    if unknown:
        raise HalError(f"hal: kernel {fn.__name__}: do_not_specialize names no parameter: {sorted(unknown)}")
    return out


def _kind(param: _Param, value: Any) -> str:
    """t pointer, i int, b bool, f float, n None, a annotated integer."""
    if hasattr(value, "data_ptr"):
        return "t"
    if value is None:
        return "n"
    kind = {bool: "b", int: "i", float: "f"}.get(value.__class__)
    if kind is None:
        raise TypeError(
            f"hal: parameter {param.name}: a tensor, int, float, bool or None; got {type(value).__name__}"
        )
    return "a" if param.typed and kind == "i" else kind


def _generate(launch: Launch, pattern: str) -> tuple[Callable[..., None], Callable[..., Any]]:
    """The fast path for one pattern of argument kinds, and its key alone, as straight-line source.

    Kinds are guarded, not keyed: an argument of another kind raises TypeError or AttributeError in the
    first block, before anything is launched, and the call starts over at `Launch._first`.
    """
    names = [f"a{i}" for i in range(len(pattern))]
    tensors = [i for i, c in enumerate(pattern) if c == "t"]
    guard, key = [], []
    for i, c in enumerate(pattern):
        p, a = launch.args[i], names[i]
        if c == "t":
            guard.append(f"p{i} = {a}.data_ptr()")
            key.append(f"{a}.dtype")
        elif c == "n":
            guard.append(f"if {a} is not None: raise TypeError")
        elif c == "a":
            guard.append(f"if {a}.__class__ is not int: raise TypeError")
            if p.specialize:
                key.append(f"{a} == 1 or not {a} & 15")
                key.append(f"{a} == 1")
        elif c == "i":
            guard.append(f"if {a}.__class__ is not int: raise TypeError")
            if p.specialize:
                key.append(f"(1 if {a} == 1 else 16 if not {a} & 15 else 0)")
            key.append(f"(0 if -2147483648 <= {a} <= 2147483647 else 1 if {a} <= 9223372036854775807 else 2)")
        else:
            guard.append(f"if {a}.__class__ is not {'bool' if c == 'b' else 'float'}: raise TypeError")
    aligned = [i for i in tensors if launch.args[i].specialize]
    if aligned:
        every = " | ".join(f"p{i}" for i in aligned)
        each = ", ".join(f"p{i} & 15 == 0" for i in aligned)
        key.append(f"True if not ({every}) & 15 else ({each},)")
    dev = f"a{tensors[0]}.get_device()" if tensors else "current_device()"
    same = "".join(f" or a{i}.get_device() != dev" for i in tensors[1:])
    args = _place(launch, [f"p{i}" if c == "t" else names[i] for i, c in enumerate(pattern)])
    pointers = "; ".join(g for g in guard if not g.startswith("if")) or "pass"
    tail = "".join(f", {a}" for a in args)
    body = f"""
def key_of({", ".join(names)}):
    {pointers}
    return ("{pattern}", {dev}, {", ".join(key)})

def fast(grid, {", ".join(names)}):
    try:
        {pointers}
        {(chr(10) + "        ").join(g for g in guard if g.startswith("if")) or "pass"}
        dev = {dev}
    except (TypeError, AttributeError):
        return first(grid, {", ".join(names)})
    if (
        runtime.launch_enter_hook is not enter or enter.calls or runtime.launch_exit_hook is not leave
        or leave.calls or runtime.debug or compilation.instrumentation_mode or pre_run
    ):
        return triton_launch(grid, {", ".join(names)})
    key = ("{pattern}", dev, {", ".join(key)})
    hit = cache.get(key)
    if hit is None or hit.triton{same} or (many and dev != current_device()):
        return miss(key, grid, ({", ".join(names)},))
    if globals_ and changed(globals_):
        return triton_launch(grid, {", ".join(names)})
    fn, coop, pdl, _, _, meta, _, _, _ = hit.head
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    hit.launch(x, y, z, stream(dev), fn, coop, pdl, None, None, meta, None, None, None{tail})
"""
    space: dict[str, Any] = {
        "runtime": knobs.runtime, "compilation": knobs.compilation, "enter": knobs.runtime.launch_enter_hook,
        "leave": knobs.runtime.launch_exit_hook, "pre_run": launch.kernel.jit.pre_run_hooks,
        "first": launch._first, "miss": launch.miss, "triton_launch": launch.triton_launch,
        "cache": launch.compiled, "stream": _stream, "current_device": _current_device,
        "many": torch.cuda.device_count() > 1, "globals_": _used_globals(launch.kernel), "changed": _changed,
    }  # fmt: skip
    exec(body, space)
    return space["fast"], space["key_of"]


def forget() -> None:
    """Drop every bound launch, so that the next is made anew. Launches that callers hold stay as they are."""
    for kernel in _kernels:
        kernel._bound.clear()
    for caches in _forgetful:
        caches.clear()


def keeps(cache: Any) -> Any:
    """Register a dict of launches that `forget` must clear too; returns it."""
    _forgetful.append(cache)
    return cache


def _compile(launch: Launch, args: Sequence[Any]) -> _Bound:
    compiled = launch.kernel.jit.run(*args, grid=(1,), warmup=True, **launch.static)
    if compiled is None:
        raise HalError(f"hal: kernel {launch.kernel.name}: a jit_cache_hook of Triton refused to compile it")
    return _Bound(compiled.result() if hasattr(compiled, "result") else compiled)


def _place(launch: Launch, values: Sequence[Any]) -> list[Any]:
    """Triton's C launcher takes a place for every parameter, and looks at those of constexprs never."""
    return [*values, *[None] * (len(launch.kernel.params) - len(launch.args))]


_CODES = {
    "constexpr": "-",
    "i1": "b",
    "u1": "b",
    "i32": "i",
    "i64": "l",
    "u64": "l",
    "fp32": "f",
    "fp64": "d",
}


def _codes(compiled: Any, params: Sequence[_Param]) -> str | None:
    """How the compiled kernel takes each argument, for the helper in C; None where it does not know a type."""
    signature = compiled.src.signature
    codes = ["p" if str(signature[p.name]).startswith("*") else _CODES.get(signature[p.name]) for p in params]
    return None if None in codes else "".join(map(str, codes))


@cache
def _helper() -> Any:
    """The compiled ``_launch.c``, or None; `_why_no_helper` says why. Compiled once, as Triton's own launchers are."""
    global _why_no_helper
    if lane() != "device" or _why_not_prebound is not None:
        _why_no_helper = _why_not_prebound or f"{lane()} lane"
        return None
    try:
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise RuntimeError("it counts on the GIL")
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if exchange is None:
            raise RuntimeError(
                f"torch {torch.__version__} has no DLPack exchange interface: 2.10 and later have"
            )
        driver = ctypes.CDLL("libcuda.so.1")
        addresses = [
            ctypes.cast(f, ctypes.c_void_p).value for f in (driver.cuLaunchKernelEx, driver.cuCtxGetDevice)
        ]
        module = _built()
        module.setup(
            exchange, 2, *addresses, knobs.runtime, knobs.compilation, torch.Tensor, torch.nn.Parameter
        )  # 2: DLPack's number of CUDA
        return module
    except Exception as e:  # whatever it is that is missing, the Python path does the same
        _why_no_helper = f"{type(e).__name__}: {e}".splitlines()[0]
        return None


def _built() -> Any:
    from triton.backends.nvidia.driver import include_dirs
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_name("_launch.c").read_text(encoding="utf-8")
    return compile_module_from_src(src=source, name="hal_launch", include_dirs=include_dirs)


def _grid3(grid: Grid) -> Grid:
    return (*grid, 1, 1)[:3]


def _used_globals(kernel: Kernel) -> list[Any]:
    """Module globals that the kernel's code reads: Triton compiles their values in."""
    _ = kernel.jit.cache_key
    used = []
    for (name, _), (value, space) in kernel.jit.used_global_vals.items():
        now = space.get(name)
        # Triton keeps copies, and compares them at every launch; a constexpr can be recognised by identity.
        same = isinstance(now, triton.language.constexpr) and now == value
        used.append((name, now if same else value, space))
    return used


def _changed(used: list[Any]) -> bool:
    return any(
        space.get(name, _kernels) is not value and space.get(name) != value for name, value, space in used
    )


_interpreting = threading.RLock()
"""Triton's interpreter keeps the program's place in the grid, and its patches of the language, in globals."""

_why_no_helper = ""
_kernels: list[Kernel] = []
_forgetful: list[Any] = []
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
