"""Runs a lowered kernel on CPU tensors, a program at a time, every access checked.

The programs of a launch run one after the other, yet a race is found in any order: a byte remembers who
wrote and who read it, and a second program that touches what another wrote, or writes what another
touched, is an error at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.lowered import instrument, runtime, toolchain
from hal.lowered.errors import AccessError, LoweredError, LoweringError, RaceError
from hal.lowered.lower import Lowered

ARENA_BYTES = 1 << 30
MAX_PROGRAMS = 65535
"""CANN's limit of a launch's grid."""

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
        self.params = instrument.params(lowered.llvm)[1]
        self._run = runtime.load()
        target = _target()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(_machine_code(lowered, traced, target)))
        self._engine.finalize_object()
        self._entry = self._engine.get_function_address("hal_entry")
        self._constants = self._engine.get_global_value_address("hal_constants")
        self._lock = threading.Lock()
        self._state = runtime.State()
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
        ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
        ctypes.memset(self._sink, 0, 8192)
        state.arena, state.arena_end = self._arena_at, self._arena_at + ARENA_BYTES
        state.sink, state.constants = ctypes.addressof(self._sink), self._constants
        state.traced = self.traced
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
                handle = runtime.HANDLE | len(tensors) << runtime.ARGUMENT_SHIFT
                at = handle if self.traced else value.data_ptr()
                words += [at, at, 0, value.numel(), 1]
                tensors.append((name, value))
            elif type_.startswith("fp"):
                words.append(struct.unpack("<i", struct.pack("<f", value))[0])
            else:
                words.append(value - (1 << 64) if value >= 1 << 63 else int(value))
        if len(words) != len(self.params) - 6 or len(tensors) > runtime.MAX_ARGUMENTS:
            raise LoweredError(
                f"hal: kernel {self.lowered.name}: {len(words)} words for {len(self.params) - 6} parameters"
            )
        shadow = _Shadow(state, tensors, shared) if self.traced else None
        packed = (ctypes.c_int64 * len(words))(*words)
        try:
            self._run(self._entry, ctypes.addressof(state), ctypes.addressof(packed), *grid)
        finally:
            if shadow is not None:
                shadow.close()
        if state.error:
            raise self._error(grid, tensors)
        if not self.traced:
            return {}
        return {name: _traffic(state.argument[i]) for i, (name, _) in enumerate(tensors)}

    def _error(self, grid: tuple[int, int, int], tensors: Sequence[tuple[str, Any]]) -> LoweredError:
        s, name = self._state, self.lowered.name
        kind, offset, size = s.error, s.error_offset, s.error_size
        verb = "write" if s.error_access & runtime.WRITE else "read"
        program = _program(s.error_program, grid)
        if kind == runtime.MEMORY:
            return LoweredError(
                f"hal: kernel {name}, program {program}: its buffers exceed {ARENA_BYTES} bytes"
            )
        if kind == runtime.WILD:
            return AccessError(name, None, program, verb, 0, size)
        argument = tensors[s.error_argument][0]
        if kind == runtime.RACE:
            other = None if s.error_other < 0 else _program(s.error_other, grid)
            return RaceError(name, argument, program, other, verb, offset)
        extent = s.argument[s.error_argument].extent
        distance = offset if offset < 0 else max(0, offset + size - extent)
        return AccessError(name, argument, program, verb, distance, size)


class _Shadow:
    """Fills the table of arguments, and keeps two words for each byte that they span: who wrote, who read.

    Arguments that share memory share them. The pages come zeroed, and only when they are touched: a
    cache of gigabytes costs what is used of it.
    """

    def __init__(
        self, state: runtime.State, tensors: Sequence[tuple[str, Any]], shared: frozenset[str]
    ) -> None:
        self._maps: list[mmap.mmap] = []
        state.arguments = len(tensors)
        spans = []
        for entry, (name, t) in zip(state.argument, tensors, strict=False):
            extent = _extent(t)
            dims, inner = _gaps(t)
            entry.base, entry.extent, entry.shared = t.data_ptr(), extent, name in shared
            entry.dims, entry.inner = len(dims), inner
            for dim, (size, stride) in zip(entry.dim, dims, strict=False):
                dim.size, dim.stride = size, stride
            if extent:
                spans.append((t.data_ptr(), t.data_ptr() + extent, entry))
        group: list[tuple[int, int, Any]] = []
        end = 0
        for span in sorted(spans, key=lambda s: s[:2]):
            if group and span[0] >= end:
                self._map(group, end)
                group = []
            end = max(end, span[1]) if group else span[1]
            group.append(span)
        if group:
            self._map(group, end)

    def _map(self, group: list[tuple[int, int, Any]], end: int) -> None:
        start = group[0][0]
        size = (end - start) * 4
        both = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._maps.append(both)
        first = ctypes.c_char.from_buffer(both)
        at = ctypes.addressof(first)
        del first
        for low, _, entry in group:
            entry.writers = at + (low - start) * 4
            entry.readers = at + size + (low - start) * 4

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
    if len(dims) > runtime.MAX_DIMS:
        return [], 0
    return [(n, stride) for stride, n in dims], inner


def _traffic(entry: runtime.Argument) -> Traffic:
    count, size = entry.count, entry.bytes
    return Traffic(
        scalar_reads=count[0],
        scalar_writes=count[runtime.WRITE],
        rows_in=count[runtime.COPY],
        rows_out=count[runtime.COPY | runtime.WRITE],
        copies_in=entry.copies[0],
        copies_out=entry.copies[1],
        bytes_read=size[0] + size[runtime.COPY],
        bytes_written=size[runtime.WRITE] + size[runtime.COPY | runtime.WRITE],
    )


def _program(linear: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    i = linear - 1
    return i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1])


@functools.lru_cache(maxsize=1)
def _host() -> tuple[str, str, str]:
    """This CPU's name and features, and all that an object file depends on besides its kernel."""
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    ours = [
        Path(file).read_text(encoding="utf-8") for file in (__file__, instrument.__file__, runtime.__file__)
    ]
    return cpu, features, repr((cpu, features, llvmlite.__version__, ours))


def _target() -> Any:
    """LLVM for this CPU; anew for each engine, which owns it."""
    import llvmlite.binding as llvm

    cpu, features, _ = _host()
    triple = llvm.Target.from_default_triple()
    return triple.create_target_machine(cpu=cpu, features=features, opt=1, jit=True)


def _machine_code(lowered: Lowered, traced: bool, target: Any) -> bytes:
    """The object file of a kernel, from the cache on disk or compiled now."""
    import llvmlite.binding as llvm

    key = hashlib.sha256(repr((_host()[2], traced, lowered.llvm)).encode()).hexdigest()
    path = toolchain.cache_dir() / key[:2] / f"{key}.o"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    try:
        module = llvm.parse_assembly(instrument.instrument(lowered.llvm, traced))
        module.verify()
    except RuntimeError as e:
        raise LoweringError(lowered.name, "LLVM", str(e)) from None
    module.triple = llvm.get_default_triple()
    module.data_layout = str(target.target_data)
    # Most kernels run a few times: what costs more to compile than it saves is left out.
    tuning = llvm.create_pipeline_tuning_options(speed_level=1)
    tuning.loop_interleaving = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(target, tuning)
    builder.getModulePassManager().run(module, builder)
    code = bytes(target.emit_object(module))
    toolchain.keep(path, code)
    return code


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
