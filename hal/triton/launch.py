"""The one way a Triton kernel is started.

``kernel[grid](...)`` spends 10-16 us of host time per launch, more than most of these kernels run. Here Triton's own
launch runs once for each kind of arguments: it compiles, and ``_launch.c`` learns what it compiled. From then on the
launch is that file's, which knows a compiled kernel by everything that Triton specialises on.

The key of a compiled kernel has two halves. `Kernel.bind` takes the static one: constexprs and compile
options, by value *and* type (``1``, ``True`` and ``1.0`` are equal, and compile differently). ``_launch.c``
adds the other one at each call: device, every pointer's dtype and 16-byte alignment, every integer's
class (1, divisible by 16, neither) and width (i32, i64, u64 by value), bool, float, None. What an
annotation fixes (``n: tl.int64``) is not keyed, because Triton doesn't look at it either.

Lanes: on a device the above, or Triton's own launch where there is no C compiler; under TRITON_INTERPRET=1 Triton's
interpreter; with HAL_LANE=lowered the kernel's Ascend IR on the CPU. Kernels and their launchers are the same in all
three.

Example:
    >>> @launch.jit(do_not_specialize=("n",))                                    # doctest: +SKIP
    ... def copy(src, dst, n: tl.int64, BLOCK: tl.constexpr): ...
    >>> copy((4,), src, dst, n, BLOCK=1024, num_warps=4)                          # doctest: +SKIP
    >>> fast = copy.bind(BLOCK=1024, num_warps=4); fast((4,), src, dst, n)        # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

import torch
import triton

from hal._errors import ArgumentError, HalError
from hal.ops import _native

# triton-ascend 3.2 is of an age before `triton.knobs`; no path that it takes needs them.
knobs: Any = getattr(triton, "knobs", None)

TESTED = ((3, 6), (3, 7))
"""Triton versions [first, last) whose compiled kernels ``_launch.c`` knows how to start."""

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
    there = _helper() is not None
    return "prebound" if there and not _why_no_helper else f"Triton's own launch: {_why_no_helper}"


_INTERPRET = bool(knobs.runtime.interpret) if knobs else os.environ.get("TRITON_INTERPRET") == "1"
_LANE = "lowered" if os.environ.get("HAL_LANE") == "lowered" else "interpreter" if _INTERPRET else "device"
if _INTERPRET:
    from hal.triton import interpreter as _interpreter

    _interpreter.install()


@dataclass(frozen=True)
class Map:
    """How one of a Gluon kernel's last parameters before the constexprs is made: a tensor map (`gl`'s tensor
    descriptor) of another argument's rows, by which the copy engine reads boxes of them. Callers give nothing for it.

    A kernel gets one where its constexpr `when` is true, else None.
    """

    name: str
    of: str
    """Whose rows; the names of the parameters that say how many (int64), and what lies between them (int64), in `unit`
    elements: a constexpr."""
    rows: str
    stride: str
    unit: str
    columns: int
    """Of a row; 0: all that lies between rows."""
    box: tuple[int, int]
    """Rows and columns that are read at once: as many columns as 128 bytes are."""
    when: str


@overload
def jit(fn: Callable[..., Any]) -> Kernel: ...
@overload
def jit(
    *, do_not_specialize: Sequence[str] = (), gluon: bool = False, maps: Sequence[Map] = ()
) -> Callable[[Callable[..., Any]], Kernel]: ...
def jit(
    fn: Callable[..., Any] | None = None,
    *,
    do_not_specialize: Sequence[str] = (),
    gluon: bool = False,
    maps: Sequence[Map] = (),
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """Make a `Kernel` of a plain Triton function.

    Args:
        fn: the function, when used without arguments.
        do_not_specialize: parameters whose alignment or divisibility must not choose another binary.
        gluon: the function is written in Gluon, which only devices and `hal inspect` understand.
        maps: parameters that are made of others, at most two, in their order.
    """
    if fn is None:
        return lambda f: Kernel(f, tuple(do_not_specialize), gluon, tuple(maps))
    return Kernel(fn, tuple(do_not_specialize), gluon, tuple(maps))


class Kernel:
    """A Triton kernel and all its compiled forms. Made by `jit`; called as ``kernel(grid, *args, **static)``."""

    def __init__(
        self,
        fn: Callable[..., Any],
        do_not_specialize: tuple[str, ...],
        gluon: bool = False,
        maps: tuple[Map, ...] = (),
    ) -> None:
        jit = importlib.import_module("triton.experimental.gluon").jit if gluon else triton.jit
        self.jit = jit(fn, do_not_specialize=list(do_not_specialize))
        self.name = fn.__name__
        if hasattr(self.jit, "_do_compile"):
            self.jit._do_compile = self._refuse_in_capture(self.jit._do_compile)
        self.fn = fn
        self.maps = maps
        made = {m.name for m in maps}
        self.params = [p for p in _params(fn, do_not_specialize) if p.name not in made]
        self._bound: dict[Any, Launch] = {}
        _kernels.append(self)

    def __call__(self, grid: Grid, *args: Any, **static: Any) -> None:
        self.bind(**static)(grid, *args)

    def bind(self, **static: Any) -> Launch:
        """The launch of this kernel with these constexprs and compile options, made once and kept."""
        key = tuple((k, v.__class__, repr(v) if v.__class__ is float else v) for k, v in sorted(static.items()))
        launch = self._bound.get(key)
        if launch is None:
            launch = self._bound.setdefault(key, Launch(self, static))
        return launch

    def _refuse_in_capture(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        """Triton's compilation, except while a graph is captured."""

        def refusing(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                raise HalError(
                    f"hal: kernel {self.name} would be compiled during graph capture; "
                    "run the op once before, or call hal.warmup"
                )
            return compile(*args, **kwargs)

        return refusing

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


class Launch:
    """A kernel with its constexprs and options fixed; called as ``launch(grid, *args)``.

    ``start`` is the same without a frame in between.
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
        self._lock = threading.RLock()
        self.native: Any = None
        """The launch of ``_launch.c``, where there is one."""
        self.start: Callable[..., None] = {
            "interpreter": self._interpret,
            "lowered": self._lower,
            "device": self._launch if knobs else self._launch_ascend,
        }.get(lane()) or self.recorder  # type: ignore[assignment]
        if self.start == self._launch and (helper := _helper()) is not None:
            params = bytes(1 * p.specialize + 2 * p.typed for p in self.args)
            used = _used_globals(kernel)
            hooks = kernel.jit.pre_run_hooks
            # More arguments than it has room for: by Triton's own launch.
            with contextlib.suppress(ValueError):
                self.native = helper.Launch(self._launch, params, hooks, used)
                self.start = self.native

    def __call__(self, grid: Grid, *args: Any) -> None:
        self.start(grid, *args)

    def _interpret(self, grid: Grid, *args: Any) -> None:
        with _interpreting:
            self.kernel.jit[grid](*args, **self.constexprs)

    def _lower(self, grid: Grid, *args: Any) -> None:
        lowered = importlib.import_module("hal.lowered")
        lowered.run(self.kernel.jit, grid, args, self.constexprs, self.options)

    def _launch_ascend(self, grid: Grid, *args: Any) -> None:
        """triton-ascend's own launch, on the current stream of the tensors' device."""
        # It starts on the current device, whosever memory it is given.
        with torch.get_device_module("npu").device(self._device(args, "npu")):
            self.kernel.jit[grid](*args, **self.static)

    def _launch(self, grid: Grid, *args: Any) -> None:
        """Triton's own launch: of kinds of arguments that are new, with hooks or instrumentation set, and where there
        is no helper."""
        self._run(grid, args)

    def prepare(self, *args: Any) -> None:
        """Compile, if need be, what a call with such arguments would start; starts nothing."""
        if self.recorder is not None:
            self.recorder((1, 1, 1), *args)
        if lane() == "device" and knobs is not None:
            self._run((1,), args, warmup=True)

    def _run(self, grid: Grid, args: tuple[Any, ...], warmup: bool = False) -> None:
        """Triton's own launch, or its compilation alone, from which the helper learns."""
        # The lock: of threads that race, one compiles, and one loads: Triton shows a kernel that is half loaded.
        with torch.cuda.device(self._device(args)), self._lock:
            compiled = self.kernel.jit.run(*self.given(args), grid=grid, warmup=warmup, **self.static)
            if compiled is None:
                raise HalError(f"hal: kernel {self.kernel.name}: a jit_cache_hook of Triton refused to compile it")
            if self.native is not None:
                form = _form(compiled.result() if hasattr(compiled, "result") else compiled, self)
                if form is not None:
                    self.native.add(args, *form)

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as Triton takes them: with what is made of others."""
        if not self.kernel.maps:
            return args
        named = dict(zip((p.name for p in self.args), args, strict=True))
        return (*args, *(self._mapped(m, named) if self.static[m.when] else None for m in self.kernel.maps))

    def _mapped(self, m: Map, named: dict[str, Any]) -> Any:
        """A map as Triton takes it."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        of, rows, stride = named[m.of], named[m.rows], named[m.stride] * self.static[m.unit]
        columns = m.columns or stride
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * of.dtype.itemsize, rank=2)
        if not rows:  # no box is read, but Triton makes no map of nothing
            of, rows = torch.empty(columns, dtype=of.dtype, device=of.device), 1
        return TensorDescriptor(of, [rows, columns], [stride, 1], list(m.box), layout)

    def _device(self, args: Sequence[Any], kind: str = "cuda") -> int:
        """The device of the tensors; an error where an argument is not one that kernels take."""
        if len(args) != len(self.args):
            raise TypeError(f"hal: kernel {self.kernel.name}: {len(self.args)} arguments expected, {len(args)} given")
        device: int | None = None
        for p, a in zip(self.args, args, strict=True):
            if hasattr(a, "data_ptr"):
                here = a.get_device()
                if here < 0 or (device is not None and here != device):
                    where = f"a tensor on {kind}:{device}, like the others"
                    want = f"a{'n' * (kind == 'npu')} {kind.upper()} tensor" if device is None else where
                    raise ArgumentError(self.kernel.name, p.name, want, f"one on {a.device}")
                device = here
            elif a is not None and a.__class__ not in (bool, int, float):
                raise TypeError(f"hal: parameter {p.name}: a tensor, int, float, bool or None; got {type(a).__name__}")
        return torch.get_device_module(kind).current_device() if device is None else device


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


_CODES = {"constexpr": "-", "i1": "b", "u1": "b", "i32": "i", "i64": "l", "u64": "l", "fp32": "f", "fp64": "d"}


def _form(compiled: Any, of: Launch) -> tuple[int, int, int, bool, str, tuple[tuple[int, ...], ...]] | None:
    """What the helper must know of a compiled kernel: function, warps, shared memory, whether it waits for the kernel
    before it by itself (PDL), how it takes each argument, and its maps. None where the helper can't start it."""
    global _why_no_helper
    try:
        run = compiled.run
        warps, ctas, shared = compiled.packed_metadata
        if run.global_scratch_size or run.profile_scratch_size or run.launch_cooperative_grid or ctas != 1:
            return None
        signature = compiled.src.signature
        codes = ["p" if str(signature[p.name]).startswith("*") else _CODES.get(signature[p.name]) for p in of.args]
        if None in codes:
            return None
        return compiled.function, warps, shared, bool(run.launch_pdl), "".join(map(str, codes)), _maps(compiled, of)
    except (AttributeError, ValueError) as moved:
        _why_no_helper = f"Triton {triton.__version__}: {moved}"
        return None


def _maps(compiled: Any, of: Launch) -> tuple[tuple[int, ...], ...]:
    """A kernel's maps as the helper makes them, by what the compiler says of their form."""
    maps = [m for m in of.kernel.maps if of.static[m.when]]
    if not maps:
        return ()
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    at = [p.name for p in of.args].index
    made = []
    for m, form in zip(maps, compiled.metadata.tensordesc_meta, strict=True):
        kind, size = TMA_DTYPE_DEVICE_TO_HOST[form["elem_type"]], form["elem_size"]
        rows, columns = form["block_size"]
        where = at(m.of), at(m.rows), at(m.stride)
        unit = of.static[m.unit]
        made.append((*where, kind, form["swizzle"], size * unit, unit, m.columns, columns, rows))
    return tuple(made)


@cache
def _helper() -> Any:
    """The compiled ``_launch.c``, or None; `_why_no_helper` says why."""
    global _why_no_helper
    try:
        if not TESTED[0] <= tuple(int(p) for p in triton.__version__.split(".")[:2]) < TESTED[1]:
            raise RuntimeError(f"Triton {triton.__version__} is outside the tested range 3.6")
        driver = ctypes.CDLL("libcuda.so.1")
        addresses = [
            ctypes.cast(f, ctypes.c_void_p).value
            for f in (driver.cuLaunchKernelEx, driver.cuCtxGetDevice, driver.cuStreamIsCapturing)
        ]
        module = _native.module()
        cuda = 2  # DLPack's number
        encode = ctypes.cast(driver.cuTensorMapEncodeTiled, ctypes.c_void_p).value
        module.drive(cuda, *addresses, knobs.runtime, knobs.compilation, _empty_strided(), encode, _of_graphs(driver))
        return module
    except Exception as e:  # whatever it is that is missing, Triton's own launch does the same
        _why_no_helper = f"{type(e).__name__}: {e}".splitlines()[0]
        return None


GRAPHS_FROM = 12060
"""The driver's version from which launching a graph takes no longer for each kernel of a chain. 13000 was measured."""


def _of_graphs(driver: ctypes.CDLL) -> tuple[int | None, ...]:
    """What ``_graphs.c`` makes and launches graphs by; nothing where the driver is older than that."""
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) or version.value < GRAPHS_FROM:
        return ()
    names = (
        "cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphAddDependencies_v2", "cuGraphInstantiateWithFlags",
        "cuGraphDestroy", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch", "cuThreadExchangeStreamCaptureMode",
        "cuStreamGetPriority", "cuStreamGetGreenCtx",
    )  # fmt: skip
    return tuple(ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in names)


def _empty_strided() -> Callable[..., torch.Tensor]:
    """A new tensor of sizes, strides and a dtype on the current device: as Inductor's code makes one, or by what
    everybody calls, which takes twice as long."""
    found = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    return found or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))


def _used_globals(kernel: Kernel) -> tuple[tuple[str, Any, dict[str, Any]], ...]:
    """Module globals that the kernel's code reads, whose values Triton compiles in: (name, value, where)."""
    _ = kernel.jit.cache_key
    used = []
    for (name, _), (value, space) in kernel.jit.used_global_vals.items():
        now = space.get(name)
        # Triton keeps copies, and compares them at every launch. The helper goes by identity, which says enough of a
        # constexpr alone.
        same = isinstance(now, triton.language.constexpr) and now == value
        used.append((name, now if same else value, space))
    return tuple(used)


_interpreting = threading.RLock()
"""Triton's interpreter keeps the program's place in the grid, and its patches of the language, in globals."""

_why_no_helper = ""
_kernels: list[Kernel] = []
_forgetful: list[Any] = []
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)
"""A device's current stream, as a number: what backends keep their buffers by."""


def _capture(device: int) -> tuple[int, int] | None:
    """(number, stream) of the capture that a device's current stream is in, if the driver tells."""
    stream, status, number = _stream(device), ctypes.c_int(), ctypes.c_uint64()
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    return None if failed or status.value != 1 else (number.value, stream)
