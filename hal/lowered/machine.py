"""Runs a lowered kernel on CPU tensors, a program at a time, every access checked.

The programs of a launch run one after the other, yet a race is found in any order: a byte remembers who
wrote and who read it, and a second program that touches what another wrote, or writes what another
touched, is an error at once. What is remembered is kept by lines of memory, and by bytes only where two programs
share a line.
"""

from __future__ import annotations

import array
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

from hal.lowered import instrument, pins, runtime, toolchain
from hal.lowered.errors import AccessError, LoweredError, LoweringError, RaceError
from hal.lowered.lower import Lowered

ARENA_BYTES = 1 << 30
KEPT_BYTES = 64 << 20
"""Of the trace: what a launch touched beyond them is given back when it ends."""
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


class _Workspace:
    """The memory of one launch at a time: the runtime's state, the programs' buffers, and the trace."""

    def __init__(self) -> None:
        self.state = runtime.State()
        self.at = ctypes.addressof(self.state)
        self._sink = ctypes.create_string_buffer(8192)
        self.state.sink = ctypes.addressof(self._sink)
        self._arena, self.state.arena = _reserve(ARENA_BYTES)
        self._trace: mmap.mmap | None = None
        self._blocks = 0

    def make_room(self, blocks: int) -> None:
        """For the trace of so many blocks of memory. Pages come zeroed, and only when they are touched: a cache of
        gigabytes costs what is used of it."""
        if blocks <= self._blocks:
            return
        self._blocks = max(blocks, 2 * self._blocks)
        lines = self._blocks * (runtime.BLOCK // runtime.LINE)
        self._trace, at = _reserve((self._blocks + lines) * runtime.ENTRY + lines * runtime.BYTEWISE)
        self.state.blocks, self.state.lines = at, at + self._blocks * runtime.ENTRY
        self.state.bytewise = self.state.lines + lines * runtime.ENTRY

    def rest(self, blocks: int) -> None:
        """After a launch of so many blocks: what a large one touched is given back."""
        lines = blocks * (runtime.BLOCK // runtime.LINE)
        used = (blocks + lines) * runtime.ENTRY + self.state.bytewise_used * runtime.BYTEWISE
        if used > KEPT_BYTES and self._trace is not None:
            self._trace.madvise(mmap.MADV_DONTNEED)


_workspaces: list[_Workspace] = []
"""Those at rest: as many as launches ran at once."""


def _reserve(size: int) -> tuple[mmap.mmap, int]:
    """Memory that is there when it is touched, and its address."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Machine:
    """A lowered kernel, compiled for this CPU."""

    def __init__(self, lowered: Lowered, traced: bool) -> None:
        import llvmlite.binding as llvm

        self.lowered, self.traced = lowered, traced
        self._kinds = ["u" if t == "u64" else t[0] for t in lowered.types]
        self._words = len(instrument.params(lowered.llvm)[1]) - 6
        self._run = runtime.load()
        target = _target()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(_machine_code(lowered, traced, target)))
        self._engine.finalize_object()
        self._entry = self._engine.get_function_address("hal_entry")
        self._constants = self._engine.get_global_value_address("hal_constants")

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], shared: frozenset[str]) -> dict[str, Traffic]:
        """Run all programs. Raises what they did wrong; returns the traffic, if traced and recorded."""
        words, given, names, blocks = self._pack(args, shared)
        try:
            place = _workspaces.pop()
        except IndexError:
            place = _Workspace()
        try:
            state = place.state
            state.arena_end, state.constants = state.arena + ARENA_BYTES, self._constants
            state.traced, state.arguments = self.traced, len(names)
            if self.traced:
                place.make_room(blocks)
            self._run(self._entry, place.at, given.buffer_info()[0], words.buffer_info()[0], *grid)
            if self.traced:
                place.rest(blocks)
            if state.error:
                raise self._error(state, grid, names)
            if not self.traced or _recorded.get() is None:
                return {}
            return {name: _traffic(state.argument[i]) for i, name in enumerate(names)}
        finally:
            _workspaces.append(place)

    def _pack(
        self, args: Sequence[Any], shared: frozenset[str]
    ) -> tuple[array.array[int], array.array[int], list[str], int]:
        """The kernel's words, what the runtime must know of each tensor, the tensors' names, and the blocks of
        memory that they span."""
        words = [0] * 10  # the sync lock and the workspace, which no kernel of ours has
        given: list[int] = []
        names: list[str] = []
        blocks = 0
        for name, kind, value in zip(self.lowered.args, self._kinds, args, strict=True):
            if kind == "i":
                words.append(value)
            elif kind == "*":
                if not value.is_cpu:
                    raise LoweredError(
                        f"hal: kernel {self.lowered.name}: {name} is on {value.device}; "
                        "the lowered lane runs on CPU tensors"
                    )
                base = value.data_ptr()
                layout = _layout(value.shape, value.stride(), value.dtype)
                at = runtime.HANDLE | len(names) << runtime.ARGUMENT_SHIFT if self.traced else base
                words += (at, at, 0, layout[0], 1)
                given += (base, layout[1], name in shared)
                given += layout[2]
                blocks += layout[1] // runtime.BLOCK + 1
                names.append(name)
            elif kind == "f":
                words.append(struct.unpack("<i", struct.pack("<f", value))[0])
            else:
                words.append(value - (1 << 64) if value >= 1 << 63 else value)
        if len(words) != self._words or len(names) > runtime.MAX_ARGUMENTS:
            raise LoweredError(f"hal: kernel {self.lowered.name}: {len(words)} words for {self._words} parameters")
        return array.array("q", words), array.array("q", given), names, blocks

    def _error(self, s: runtime.State, grid: tuple[int, int, int], names: Sequence[str]) -> LoweredError:
        name = self.lowered.name
        kind, offset, size = s.error, s.error_offset, s.error_size
        verb = "write" if s.error_access & runtime.WRITE else "read"
        program = _program(s.error_program, grid)
        if kind == runtime.MEMORY:
            return LoweredError(f"hal: kernel {name}, program {program}: its buffers exceed {ARENA_BYTES} bytes")
        if kind == runtime.STRAY:
            return LoweredError(
                f"hal: kernel {name}, program {program}: a loop over {size} bytes that are none of its buffers, which "
                "the lane can't check"
            )
        if kind == runtime.WILD:
            return AccessError(name, None, program, verb, 0, size)
        argument = names[s.error_argument]
        if kind == runtime.RACE:
            other = None if s.error_other < 0 else _program(s.error_other, grid)
            return RaceError(name, argument, program, other, verb, offset)
        extent = s.argument[s.error_argument].extent
        distance = offset if offset < 0 else max(0, offset + size - extent)
        return AccessError(name, argument, program, verb, distance, size)


@functools.lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> tuple[int, int, tuple[int, ...]]:
    """Elements of a tensor, bytes from its first to the end of its last, and the runtime's words for its gaps."""
    import torch

    t = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    dims, inner = _gaps(t)
    of_dims = [word for dim in dims for word in dim] + [0] * (2 * (runtime.MAX_DIMS - len(dims)))
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    extent = (last + 1) * t.element_size() if t.numel() else 0
    return t.numel(), extent, (len(dims), inner, *of_dims)


def _gaps(t: Any) -> tuple[list[tuple[int, int]], int]:
    """(size, stride in bytes) of the dims around the contiguous rows, outermost first; the bytes of a row.

    No dims: every byte of the extent is the tensor's, or its dims overlap in a way that leaves no gap to name.
    """
    item = t.element_size()
    if t.is_contiguous() or t.numel() == 0:
        return [], 0
    dims = sorted(((st * item, n) for n, st in zip(t.shape, t.stride(), strict=True) if n > 1 and st), reverse=True)
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
        Path(file).read_text(encoding="utf-8")
        for file in (__file__, instrument.__file__, pins.__file__, runtime.__file__)
    ]
    return cpu, features, repr((cpu, features, llvmlite.__version__, ours))


def _target() -> Any:
    """LLVM for this CPU; anew for each engine, which owns it."""
    import llvmlite.binding as llvm

    cpu, features, _ = _host()
    triple = llvm.Target.from_default_triple()
    return triple.create_target_machine(cpu=cpu, features=features + ",-prefer-256-bit", opt=2, jit=True)


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
    # What is compiled is kept: the loops over buffers are worth vector code, and little else is.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.loop_interleaving = True
    tuning.slp_vectorization = tuning.loop_unrolling = False
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
