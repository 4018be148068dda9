"""Runs a lowered kernel on CPU tensors, a program at a time, every access checked.

The programs of a launch run one after the other, yet a race is found in any order: a byte remembers who
wrote and who read it, and a second program that touches what another wrote, or writes what another
touched, is an error at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hal.lowered import instrument as ir
from hal.lowered import toolchain
from hal.lowered.errors import AccessError, LoweredError, LoweringError, RaceError
from hal.lowered.lower import Lowered

ARENA_BYTES = 1 << 30
MAX_PROGRAMS = 65535
"""CANN's limit of a launch's grid."""

_MAX_ARGS = 64
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass
class Traffic:
    """What the programs of a launch did through one pointer argument.

    Attributes:
        scalar_reads: single elements read straight from global memory.
        scalar_writes: single elements written there.
        copies_in: copies from global memory into a buffer: one DMA transaction each.
        copies_out: copies from a buffer to global memory.
        rows_in: contiguous pieces of those copies.
        rows_out: likewise.
        bytes_read: all bytes read, by either way.
        bytes_written: all bytes written.
    """

    scalar_reads: int = 0
    scalar_writes: int = 0
    copies_in: int = 0
    copies_out: int = 0
    rows_in: int = 0
    rows_out: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass
class Launch:
    """One launch that `recording` saw."""

    lowered: Lowered
    grid: tuple[int, int, int]
    traffic: dict[str, Traffic] = field(default_factory=dict)
    """By argument; empty where the launch was not traced."""


_recorded: ContextVar[list[Launch] | None] = ContextVar("hal_lowered_recorded", default=None)
_traced: ContextVar[bool] = ContextVar("hal_lowered_traced", default=True)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects the launches made inside the block.

    Example:
        >>> with recording() as launches:                           # doctest: +SKIP
        ...     hal.get_last_loc(table, rows, lens)
        >>> launches[0].traffic["req_to_token"].scalar_reads         # doctest: +SKIP
        3
    """
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside the block kernels run on real addresses, unchecked and optimised: for speed, or under guard pages."""
    token = _traced.set(False)
    try:
        yield
    finally:
        _traced.reset(token)


class Machine:
    """A lowered kernel, compiled for this CPU."""

    def __init__(self, lowered: Lowered, traced: bool) -> None:
        import llvmlite.binding as llvm

        self.lowered, self.traced = lowered, traced
        self.params = ir.params(lowered.llvm)[1]
        _initialise()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, jit=True
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(_machine_code(lowered, traced, target)))
        self._engine.finalize_object()
        entry = self._engine.get_function_address("hal_run")
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int32] * 3)(entry)
        self._lock = threading.Lock()
        self._state = (ctypes.c_int64 * (ir.FIRST_ARG + ir.ARG_WORDS * _MAX_ARGS))()
        self._sink = ctypes.create_string_buffer(8192)
        self._arena = mmap.mmap(-1, ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._arena_at = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))

    def __call__(
        self, grid: tuple[int, int, int], args: Sequence[Any], shared: frozenset[str]
    ) -> dict[str, Traffic]:
        """Run all programs. Raises what they did wrong; returns the traffic, if traced."""
        with self._lock:
            return self._launch(grid, args, shared)

    def _launch(
        self, grid: tuple[int, int, int], args: Sequence[Any], shared: frozenset[str]
    ) -> dict[str, Traffic]:
        state = self._state
        ctypes.memset(state, 0, ctypes.sizeof(state))
        ctypes.memset(self._sink, 0, 8192)
        state[ir.ARENA] = self._arena_at
        state[ir.ARENA_END] = self._arena_at + ARENA_BYTES
        state[ir.SINK] = ctypes.addressof(self._sink)
        names, types = self.lowered.args, self.lowered.types
        words = [0] * 10  # the sync lock and the workspace, which no kernel of ours has
        tensors: list[tuple[str, Any]] = []
        for name, type_, value in zip(names, types, args, strict=True):
            if type_.startswith("*"):
                if value.device.type != "cpu":
                    raise LoweredError(
                        f"hal: kernel {self.lowered.name}: {name} is on {value.device}; "
                        "the lowered lane runs on CPU tensors"
                    )
                at = ir.TAG | len(tensors) << ir.ARG_SHIFT | ir.BIAS if self.traced else value.data_ptr()
                words += [at, at, 0, value.numel(), 1]
                tensors.append((name, value))
            elif type_.startswith("fp"):
                words.append(struct.unpack("<i", struct.pack("<f", value))[0])
            else:
                words.append(value - (1 << 64) if value >= 1 << 63 else int(value))
        if len(words) != len(self.params) - 6 or len(tensors) > _MAX_ARGS:
            raise LoweredError(
                f"hal: kernel {self.lowered.name}: {len(words)} words for {len(self.params) - 6} parameters"
            )
        shadow = _Shadow(state, tensors, shared) if self.traced else None
        packed = (ctypes.c_int64 * len(words))(*words)
        try:
            self._run(ctypes.addressof(state), ctypes.addressof(packed), *grid)
        finally:
            if shadow is not None:
                shadow.close()
        if state[ir.ERROR]:
            raise self._error(grid, tensors)
        return {name: _traffic(state, i) for i, (name, _) in enumerate(tensors)} if self.traced else {}

    def _error(self, grid: tuple[int, int, int], tensors: Sequence[tuple[str, Any]]) -> LoweredError:
        s, name = self._state, self.lowered.name
        kind, arg, offset, size = (s[i] for i in (ir.ERROR, ir.ERR_ARG, ir.ERR_OFFSET, ir.ERR_SIZE))
        verb = "write" if s[ir.ERR_WRITE] & ir.WRITE else "read"
        program = _program(s[ir.ERR_PROGRAM], grid)
        if kind == ir.MEMORY:
            return LoweredError(
                f"hal: kernel {name}, program {program}: its buffers exceed {ARENA_BYTES} bytes"
            )
        if kind == ir.WILD:
            return AccessError(name, None, program, verb, 0, size)
        if kind == ir.RACE:
            other = s[ir.ERR_OTHER]
            return RaceError(
                name, tensors[arg][0], program, None if other < 0 else _program(other, grid), verb, offset
            )
        extent = s[ir.FIRST_ARG + arg * ir.ARG_WORDS + ir.EXTENT]
        distance = offset if offset < 0 else max(0, offset + size - extent)
        return AccessError(name, tensors[arg][0], program, verb, distance, size)


class _Shadow:
    """Fills the table of arguments, and keeps two words for each byte that they span: who wrote, who read.

    Arguments that share memory share them. The pages come zeroed, and only when they are touched: a
    cache of gigabytes costs what is used of it.
    """

    def __init__(self, state: Any, tensors: Sequence[tuple[str, Any]], shared: frozenset[str]) -> None:
        self._maps: list[mmap.mmap] = []
        state[ir.ARGS] = len(tensors)
        spans = []
        for i, (name, t) in enumerate(tensors):
            extent = _extent(t)
            at = ir.FIRST_ARG + i * ir.ARG_WORDS
            state[at + ir.BASE] = t.data_ptr()
            state[at + ir.EXTENT] = extent
            state[at + ir.SHARED] = name in shared
            dims, inner = _gaps(t)
            state[at + ir.DIMS] = len(dims)
            state[at + ir.INNER] = inner
            for j, (size, stride) in enumerate(dims):
                state[at + ir.DIM0 + 2 * j] = size
                state[at + ir.DIM0 + 2 * j + 1] = stride
            if extent:
                spans.append((t.data_ptr(), t.data_ptr() + extent, at))
        group: list[tuple[int, int, int]] = []
        end = 0
        for span in sorted(spans):
            if group and span[0] >= end:
                self._map(state, group, end)
                group = []
            end = max(end, span[1]) if group else span[1]
            group.append(span)
        if group:
            self._map(state, group, end)

    def _map(self, state: Any, group: list[tuple[int, int, int]], end: int) -> None:
        start = group[0][0]
        size = (end - start) * 4
        both = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._maps.append(both)
        first = ctypes.c_char.from_buffer(both)
        at = ctypes.addressof(first)
        del first
        for low, _, entry in group:
            state[entry + ir.WRITERS] = at + (low - start) * 4
            state[entry + ir.READERS] = at + size + (low - start) * 4

    def close(self) -> None:
        for m in self._maps:
            m.close()


def _extent(t: Any) -> int:
    """Bytes from the first element to the end of the last."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True))
    return int((last + 1) * t.element_size())


def _gaps(t: Any) -> tuple[list[tuple[int, int]], int]:
    """(size, stride in bytes) of the dims around the contiguous rows, outermost first; the bytes of a row.

    No dims: every byte of the extent is the tensor's, or its dims overlap in a way that leaves no gap to name.
    """
    item = t.element_size()
    if t.is_contiguous() or t.numel() == 0:
        return [], 0
    dims = sorted(
        ((st * item, n) for n, st in zip(t.shape, t.stride(), strict=True) if n > 1 and st), reverse=True
    )
    inner = item
    while dims and dims[-1][0] == inner:
        inner *= dims.pop()[1]
    reach = inner
    for stride, n in reversed(dims):
        if stride < reach:
            return [], 0
        reach += (n - 1) * stride
    if len(dims) > 4:
        return [], 0
    return [(n, stride) for stride, n in dims], inner


def _traffic(state: Any, i: int) -> Traffic:
    at = ir.FIRST_ARG + i * ir.ARG_WORDS
    count = [state[at + ir.COUNT + j] for j in range(4)]
    size = [state[at + ir.BYTES + j] for j in range(4)]
    return Traffic(
        scalar_reads=count[0],
        scalar_writes=count[1],
        rows_in=count[2],
        rows_out=count[3],
        copies_in=state[at + ir.COPIES],
        copies_out=state[at + ir.COPIES + 1],
        bytes_read=size[0] + size[2],
        bytes_written=size[1] + size[3],
    )


def _program(linear: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    i = linear - 1
    return i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1])


def _machine_code(lowered: Lowered, traced: bool, target: Any) -> bytes:
    """The object file of a kernel and its runtime, from the cache on disk or compiled now."""
    import llvmlite
    import llvmlite.binding as llvm

    text = ir.instrument(lowered.llvm, traced)
    cpu = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), llvmlite.__version__)
    key = hashlib.sha256(repr((cpu, traced, text)).encode()).hexdigest()
    path = toolchain.cache_dir() / key[:2] / f"{key}.o"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as e:
        raise LoweringError(lowered.name, "LLVM", str(e)) from None
    module.triple = llvm.get_default_triple()
    module.data_layout = str(target.target_data)
    tuning = llvm.create_pipeline_tuning_options(speed_level=1 if traced else 2)
    builder = llvm.create_pass_builder(target, tuning)
    builder.getModulePassManager().run(module, builder)
    code = bytes(target.emit_object(module))
    toolchain.keep(path, code)
    return code


_ready = False


def _initialise() -> None:
    global _ready
    if not _ready:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        _ready = True


_machines: dict[tuple[str, bool], Machine] = {}
_machines_lock = threading.Lock()


def launch(lowered: Lowered, grid: Sequence[int], args: Sequence[Any], shared: frozenset[str]) -> None:
    """Run `lowered` over `grid`; see `hal.lowered.run`."""
    x, y, z = (*(int(g) for g in grid), 1, 1)[:3]
    full, programs = (x, y, z), x * y * z
    if min(full) < 0 or programs > MAX_PROGRAMS:
        raise LoweredError(
            f"hal: kernel {lowered.name}: grid {tuple(grid)} has {programs} programs, CANN allows {MAX_PROGRAMS}"
        )
    traced = _traced.get()
    key = (lowered.key, traced)
    machine = _machines.get(key)
    if machine is None:
        with _machines_lock:
            machine = _machines.get(key)
            if machine is None:
                machine = _machines[key] = Machine(lowered, traced)
    traffic = machine(full, args, shared)
    seen = _recorded.get()
    if seen is not None:
        seen.append(Launch(lowered, full, traffic))
