# mypy: disable-error-code="no-untyped-call, misc, call-arg, arg-type, attr-defined, no-any-return, unused-ignore"
# torch.cuda has untyped streams and events, and calls are passed on as *args.
"""The pipelined path: gather on the device while the copy engine moves what was gathered before.

Two buffers for each (device, stream), made once (`hal.warmup` makes them ahead), each on a stream of its own: what
uses a buffer is in that stream's order, and parts of a transfer take them in turn. While the host plans the first
part the bus is idle, so what a transfer needs but its slots is found at once, and what can be is left for later.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hal.backends.cuda import _copy, _engine
from hal.backends.cuda._cache import Plans
from hal.backends.cuda._device import multiprocessors
from hal.kv import plan as kvplan
from hal.kv.pool import KVPool, Plane
from hal.triton import launch

CHUNK_BYTES = 32 << 20
"""Of one staging buffer. Long enough to hide what the host does for the next."""
FIRST, LAST = 4, 16
"""What part of a buffer the first is that goes out, and the last that comes in: nothing is copied meanwhile."""
SLOTS = 1 << 16
"""Of a transfer, up to which its slots go to the device by memory of the staging's own, which is sooner."""


@dataclass
class _Buffers:
    memory: Tensor
    now: Any
    """The stream whose they are."""
    streams: tuple[Any, ...]
    """A buffer's: its gathers or scatters, and its copies."""
    begin: Any
    uploaded: Any
    ends: tuple[Any, Any]
    """Events of a transfer: what was there before it, its slots, the ends of both streams."""
    places: Tensor
    """int32, counting from 0: as many as the most tokens that a buffer has held."""
    slots: Tensor
    pinned: Tensor
    """int64: a transfer's slots, and from where they come."""
    windows: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Parts of `slots`."""
    routes: Plans[_Route | None] = field(default_factory=lambda: Plans(256))
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Threads may share a stream, and so the buffers."""

    def route(self, src: KVPool, dst: KVPool) -> _Route | None:
        """None where no whole granules of the host's pool can go through a buffer."""
        one, other = src.planes()[0], dst.planes()[0]
        key = id(one), id(other)
        if key not in self.routes:
            host = dst if dst.device.type == "cpu" else src
            self.routes.hold(key, _Route(src, dst, self) if _stageable(host) else None, one, other)
        return self.routes[key]

    def upload(self, slots: Tensor) -> Tensor:
        """On the first buffer's stream: to `slots`, or a tensor of their own where an earlier upload is to come."""
        stream, n = self.streams[0], slots.shape[0]
        if n > SLOTS or (stream is not None and not self.uploaded.query()):
            found = _copy.upload(slots, self.memory.device)
        else:
            found = self.slots
            self.pinned.numpy()[:n] = slots.numpy()
            if stream is not None:
                _engine.one(found.data_ptr(), self.pinned.data_ptr(), 8 * n, stream.cuda_stream)
        _record(self.uploaded, stream)
        return found

    def window(self, slots: Tensor, part: slice) -> Tensor:
        """What torch cuts costs as much as a launch."""
        if slots is not self.slots:
            return slots[part]
        key = part.start, part.stop
        if key not in self.windows:
            if len(self.windows) >= 4096:
                self.windows.clear()
            self.windows[key] = slots[part]
        return self.windows[key]


_buffers: dict[tuple[int, int], _Buffers] = {}
_lock = threading.Lock()


def buffers(device: torch.device) -> _Buffers:
    """Staging for the current stream of `device`."""
    index = -1 if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
    key = (index, launch._stream(index) if index >= 0 else 0)
    found = _buffers.get(key)
    if found is None:
        with _lock:
            found = _buffers.get(key)
            if found is None:
                found = _buffers[key] = _make(device)
    return found


def _make(device: torch.device) -> _Buffers:
    memory = torch.empty(2, CHUNK_BYTES, dtype=torch.uint8, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    slots = torch.empty(SLOTS, dtype=torch.int64, device=device)
    if device.type != "cuda":
        return _Buffers(memory, None, (None, None), None, None, (None, None), none, slots, slots)
    pinned = torch.empty(SLOTS, dtype=torch.int64, device="cpu", pin_memory=True)
    now = torch.cuda.current_stream(device)
    streams = tuple(torch.cuda.Stream(device, priority=now.priority) for _ in range(2))
    for s in streams:
        memory.record_stream(s)
        slots.record_stream(s)
    begin, uploaded, *ends = (torch.cuda.Event() for _ in range(4))
    return _Buffers(memory, now, streams, begin, uploaded, (ends[0], ends[1]), none, slots, pinned)


def staged_bytes() -> int:
    """Device memory that staging holds. For `hal info`."""
    return sum(b.memory.nbytes + b.places.nbytes + b.slots.nbytes for b in _buffers.values())


@contextmanager
def side(device: torch.device) -> Iterator[int]:
    """A side stream of the current stream, after what is on that now; which then waits for it."""
    if device.type != "cuda":
        yield 0
        return
    b = buffers(device)
    b.streams[0].wait_stream(b.now)
    with torch.cuda.device(device):
        yield b.streams[0].cuda_stream
    b.now.wait_stream(b.streams[0])


def granule(host: KVPool) -> int:
    """Consecutive slots that are one piece of memory with all their layers; 0 where there is no such thing."""
    tokens = 1 if host.layout == "page_first" else host.page_size
    if host.num_layers > 1 and host.layout == "layer_first":
        return 0
    for p in host.planes():
        stride = p.token_stride if tokens == 1 else p.page_stride
        if stride != tokens * host.num_layers * p.row_bytes or max(p.bases) - p.bases[0] >= stride:
            return 0
    return tokens


def _stageable(host: KVPool) -> bool:
    """Whether whole granules of the host pool can go through a buffer."""
    tokens, rows = granule(host), [p.row_bytes for p in host.planes()]
    return bool(tokens and host.device.type == "cpu" and all(rows)) and (
        tokens * host.num_layers * sum(rows) <= CHUNK_BYTES - 512
    )


def stageable(host: KVPool, slots: Tensor, layers: range) -> bool:
    """Whether `transfer` would take it."""
    return len(layers) == host.num_layers and _stageable(host) and _whole(slots.numpy(), granule(host))


def _whole(slots: Any, tokens: int) -> bool:
    """Whether slots are whole granules of so many, in order."""
    if tokens == 1:
        return True
    if len(slots) % tokens:
        return False
    pages = slots.reshape(-1, tokens)
    return bool((pages[:, 0] % tokens == 0).all() and (pages == pages[:, :1] + np.arange(tokens)).all())


def _joined(slots: Any, tokens: int) -> Any:
    """Of each granule but the last: whether the next is its neighbour."""
    first = slots[::tokens]
    return first[1:] == first[:-1] + tokens


class _Route:
    """From one pool to another by staging buffers: all that a transfer needs but its slots."""

    def __init__(self, src: KVPool, dst: KVPool, b: _Buffers) -> None:
        self.out = dst.device.type == "cpu"
        host, pool = (dst, src) if self.out else (src, dst)
        self.device, self.tokens, self.layers = pool.device, granule(host), host.num_layers
        self.halves = [(p.bases[0], self.layers * p.row_bytes) for p in host.planes()]
        """Of the host's k and v: where they begin, and bytes of a token."""
        token_bytes = sum(size for _, size in self.halves)
        self.per_chunk = (CHUNK_BYTES - 512) // token_bytes // self.tokens * self.tokens
        self.small = max(1, self.per_chunk // (FIRST if self.out else LAST) // self.tokens) * self.tokens
        self.slots, self.host_slots = pool.num_slots, host.num_slots
        self.programs = 4 * multiprocessors(self.device.index if self.device.index is not None else -1)
        self.bases: list[list[int]] = []
        self.plans: list[_copy.Plan] = []
        for buffer, stream in zip(b.memory, b.streams, strict=True):
            staged = self._staged(host, buffer.data_ptr())
            self.bases.append([p.bases[0] for p in staged])
            sides = (pool.planes(), staged), (pool.page_size, host.page_size)
            (x, y), (page, other) = sides if self.out else (pair[::-1] for pair in sides)
            with torch.cuda.stream(stream):
                self.plans.append(_copy.Plan(x, y, page, other, self.device))

    def _staged(self, host: KVPool, at: int) -> tuple[Plane, ...]:
        """A buffer laid out as a piece of the host pool: granules one after the other."""
        planes = []
        for p, (_, size) in zip(host.planes(), self.halves, strict=True):
            planes.append(replace(p, bases=tuple(at + base - p.bases[0] for base in p.bases)))
            at += -(-self.per_chunk * size // 256) * 256
        return tuple(planes)

    def first(self, n: int) -> int:
        """Of `n` tokens, how many are the first part: few where they must be gathered before the bus has work."""
        return min(n, self.small if self.out or n <= self.small else min(self.per_chunk, n - self.small))

    def parts(self, n: int) -> list[slice]:
        """All parts: the last is small where it must be scattered when the bus has no more work."""
        last = n if self.out or n <= self.small else n - self.small
        ends = {0, n, last, *range(self.first(n), last, self.per_chunk)}
        return [slice(a, b) for a, b in itertools.pairwise(sorted(ends))]

    def move(self, i: int, places: Tensor, slots: Tensor) -> None:
        """Gather to, or scatter from, buffer `i`."""
        if self.out:  # of as many as there are of the first
            a, b, x, y = slots, places, self.slots, self.per_chunk
        else:
            a, b, x, y = places[: slots.shape[0]], slots, self.per_chunk, self.slots
        self.plans[i].run(a, b, x, y, 0, self.layers, self.layers, self.programs)

    def run_of(self, slots: Any) -> bool:
        """Whether slots of the host are one run of granules within it."""
        first, n = int(slots[0]), len(slots)
        if first < 0 or first + n > self.host_slots or first % self.tokens or n % self.tokens:
            return False
        return bool((slots[1:] == slots[:-1] + 1).all())

    def copy_run(self, i: int, first: int, n: int, stream: Any) -> None:
        """Between buffer `i` and `n` slots of the host."""
        for (real, size), staged in zip(self.halves, self.bases[i], strict=True):
            here, there = staged, real + first * size
            _engine.one(*((there, here) if self.out else (here, there)), n * size, _handle(stream))

    def copy(self, i: int, slots: Any, stream: Any) -> None:
        """Between buffer `i` and the host's runs of `slots`."""
        breaks = np.flatnonzero(~_joined(slots, self.tokens))
        if not len(breaks):
            self.copy_run(i, int(slots[0]), len(slots), stream)
            return
        at = np.concatenate([[0], breaks + 1]) * self.tokens
        count = np.diff(at, append=len(slots))
        here = np.concatenate([base + at * size for base, (_, size) in zip(self.bases[i], self.halves, strict=True)])
        there = np.concatenate([base + slots[at].astype(np.int64) * size for base, size in self.halves])
        sizes = torch.from_numpy(np.concatenate([count * size for _, size in self.halves]))
        src, dst = (torch.from_numpy(x) for x in ((here, there) if self.out else (there, here)))
        _engine.copy(kvplan.Copies(src, dst, sizes), _handle(stream))


def transfer(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: int, device: torch.device) -> int:
    """Moves all of so many layers of tokens, one of the pools on the host, and says of how many, from the first on.

    It ends where what is left has slots out of range, or is not whole granules of the host's pool in order.
    """
    b = buffers(device)
    r = b.route(src, dst)
    if r is None or layers != r.layers:
        return 0
    with b.lock:
        _record(b.begin, b.now)
        _wait(b.streams[0], b.begin)
        current = torch.cuda.current_device() if b.now is not None else None
        try:
            return _transfer(r, b, src_slots, dst_slots)
        finally:
            for stream, end in zip(b.streams, b.ends, strict=True):
                _record(end, stream)
                _wait(b.now, end)
            _turn(b.now)
            if current is not None and current != device.index:
                torch.cuda.set_device(current)


def _transfer(r: _Route, b: _Buffers, src_slots: Tensor, dst_slots: Tensor) -> int:
    """What follows its least order: the bus waits for the host, whose caches are cold after a transfer."""
    slots, pool, host = src_slots, src_slots.numpy(), dst_slots.numpy()
    if not r.out:
        slots, pool, host = dst_slots, host, pool
    n = len(host)
    first = r.first(n)
    # Whatever the slots: this writes a buffer alone.
    run = r.run_of(host[:first])
    begun = run and not r.out
    if begun:
        r.copy_run(0, int(host[0]), first, b.streams[0])
    _turn(b.streams[0])
    if b.places.shape[0] < r.per_chunk:
        b.places = torch.arange(r.per_chunk, dtype=torch.int32, device=b.memory.device)
    slots = b.upload(slots)
    if r.out:
        r.move(0, b.places, b.window(slots, slice(0, first)))
        begun = run and _within(pool[:first], r.slots)
        if begun:
            r.copy_run(0, int(host[0]), first, b.streams[0])
    if not (_within(pool, r.slots) and _within(host, r.host_slots) and _whole(host, r.tokens)):
        return first if begun and r.out else 0
    for i, part in enumerate(r.parts(n)):
        stream = b.streams[i % 2]
        if i:
            _turn(stream)
            if i == 1:
                _wait(stream, b.uploaded)
            if r.out:
                r.move(i % 2, b.places, b.window(slots, part))
        if i or not begun:
            r.copy(i % 2, host[part], stream)
        if not r.out:
            r.move(i % 2, b.places, b.window(slots, part))
    return n


def _within(slots: Any, limit: int) -> bool:
    """Of unsigned numbers the negative ones are the largest."""
    return int(slots.view(f"u{slots.itemsize}").max()) < limit


def _record(event: Any, stream: Any) -> None:
    if stream is not None:
        event.record(stream)


def _wait(stream: Any, event: Any) -> None:
    if stream is not None:
        stream.wait_event(event)


def _turn(stream: Any) -> None:
    """What follows goes to `stream`."""
    if stream is not None:
        torch.cuda.set_stream(stream)


def _handle(stream: Any) -> int:
    return stream.cuda_stream if stream is not None else 0


# --- which method -----------------------------------------------------------------------------------


@cache
def costs(device: int) -> dict[str, list[list[float]]]:
    """The cost table: direction -> rows (bytes of a run, bytes in all, GB/s of kernel, GB/s of direct).

    That of `hal tune` on this machine, or the one measured on an H200.
    """
    from hal import tune

    mine = tune.load("kv_transfer", device)
    if mine is not None:
        return mine
    found: dict[str, list[list[float]]] = json.loads(
        (Path(__file__).parent / "tables" / "kv_transfer_sm_90.json").read_text()
    )["costs"]
    return found


def choose(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: range, device: torch.device) -> str:
    """``kernel`` or ``direct``: the faster by the cost table, at the nearest measured run length and size."""
    if src.device.type == dst.device.type:
        return "kernel"
    host = dst if dst.device.type == "cpu" else src
    if not host.pinned:
        return "direct"
    slots = dst_slots if host is dst else src_slots
    if not stageable(host, slots, layers):
        return "kernel"
    per_token = host.num_layers * max(p.row_bytes for p in host.planes())
    tokens = granule(host)
    run_bytes = per_token * len(slots) / (len(slots) // tokens - np.count_nonzero(_joined(slots.numpy(), tokens)))
    total = host.num_layers * sum(p.row_bytes for p in host.planes()) * len(slots)
    return faster(device.index or 0, "d2h" if host is dst else "h2d", run_bytes, total)


@lru_cache(4096)
def faster(device: int, way: str, run_bytes: float, total: int) -> str:
    """``kernel`` or ``direct``, by what was measured nearest to runs of so many bytes, and so many in all."""
    near = min(costs(device)[way], key=lambda r: abs(math.log2(r[0] / run_bytes)) + abs(math.log2(r[1] / total)))
    return "direct" if near[3] >= near[2] else "kernel"
