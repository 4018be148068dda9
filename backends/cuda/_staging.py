# mypy: disable-error-code="no-untyped-call, misc, call-arg, arg-type, attr-defined, no-any-return, unused-ignore"
# torch.cuda has untyped streams and events, and calls are passed on as *args.
"""The pipelined path: gather on the device while the copy engine moves what was gathered before.

Two buffers for each (device, stream), made once (`hal.warmup` makes them ahead), reused in event order.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hal.backends.cuda import _copy, _engine
from hal.backends.cuda._device import multiprocessors
from hal.kv import plan as kvplan
from hal.kv.pool import KVPool, Plane

CHUNK_BYTES = 32 << 20
"""Of one staging buffer. Long enough to hide the engine's start, short enough for the first gather."""


RAMP = 8
"""What part of a buffer the last is that comes in."""


@dataclass
class _Buffers:
    memory: Tensor
    stream: Any
    places: Tensor
    """int32, counting from 0: as many as the most tokens that a buffer has held."""
    free: tuple[Any, Any]
    """Set when the buffer's last user has finished."""
    full: tuple[Any, Any]


_buffers: dict[tuple[int, int], _Buffers] = {}
_lock = threading.Lock()


def buffers(device: torch.device) -> _Buffers:
    """Staging for the current stream of `device`."""
    index = device.index if device.type == "cuda" else -1
    key = (index, torch.cuda.current_stream(device).cuda_stream if index >= 0 else 0)
    with _lock:
        found = _buffers.get(key)
        if found is None:
            memory = torch.empty(2, CHUNK_BYTES, dtype=torch.uint8, device=device)
            if index >= 0:
                stream: Any = torch.cuda.Stream(device)
                events = [torch.cuda.Event() for _ in range(4)]
                memory.record_stream(stream)
            else:
                stream, events = None, [_Now() for _ in range(4)]
            none = torch.empty(0, dtype=torch.int32, device=device)
            found = _buffers[key] = _Buffers(memory, stream, none, (events[0], events[1]), (events[2], events[3]))
    return found


class _Now:
    """Events of a lane without streams: everything has happened."""

    def record(self, stream: Any) -> None: ...


def staged_bytes() -> int:
    """Device memory that staging holds. For `hal info`."""
    return sum(b.memory.nbytes + b.places.nbytes for b in _buffers.values())


def _wait(stream: Any, event: Any) -> None:
    if stream is not None:
        stream.wait_event(event)


def _current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def side(device: torch.device) -> Iterator[int]:
    """The side stream of the current stream, after what is on that now; which then waits for it."""
    if device.type != "cuda":
        yield 0
        return
    b, now = buffers(device), torch.cuda.current_stream(device)
    b.stream.wait_stream(now)
    with torch.cuda.device(device):
        yield b.stream.cuda_stream
    now.wait_stream(b.stream)


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


def stageable(host: KVPool, slots: Tensor, layers: range) -> bool:
    """Whether whole granules of the host pool are wanted, in order, and fit a buffer."""
    tokens = granule(host)
    if not tokens or len(layers) != host.num_layers or len(slots) % tokens or host.device.type != "cpu":
        return False
    if tokens * host.num_layers * sum(p.row_bytes for p in host.planes()) > CHUNK_BYTES - 512:
        return False
    if not all(p.row_bytes for p in host.planes()):
        return False
    if tokens == 1:
        return True
    pages = slots.numpy().reshape(-1, tokens)  # a third of what torch's operators take on so few numbers
    return bool((pages[:, 0] % tokens == 0).all() and (pages == pages[:, :1] + np.arange(tokens)).all())


def _joined(slots: Tensor, tokens: int) -> Any:
    """Of each granule but the last: whether the next is its neighbour."""
    first = slots.numpy()[::tokens]
    return first[1:] == first[:-1] + tokens


@dataclass(frozen=True)
class _Stage:
    """One staging buffer laid out as a piece of a host pool: granules one after the other."""

    planes: tuple[Plane, ...]
    bases: tuple[int, ...]


_stages: dict[tuple[Any, ...], tuple[_Stage, _Stage]] = {}


def _stage(host: KVPool, b: _Buffers, per_chunk: int) -> tuple[_Stage, _Stage]:
    key = (host.planes(), b.memory.data_ptr(), per_chunk)
    found = _stages.get(key)
    if found is None:
        two = []
        for buffer in b.memory:
            at, bases, planes = buffer.data_ptr(), [], []
            for p in host.planes():
                bases.append(at)
                planes.append(replace(p, bases=tuple(at + base - p.bases[0] for base in p.bases)))
                at += -(-per_chunk * host.num_layers * p.row_bytes // 256) * 256
            two.append(_Stage(tuple(planes), tuple(bases)))
        if len(_stages) >= 64:
            _stages.clear()
        found = _stages[key] = two[0], two[1]
    return found


def _pieces(host: KVPool, tokens: int, slots: Tensor, bases: tuple[int, ...], out: bool) -> kvplan.Copies:
    """The copies between staging and the host's runs."""
    breaks = np.flatnonzero(~_joined(slots, tokens)) + 1
    at = np.concatenate([[0], breaks]) * tokens
    count = np.diff(at, append=len(slots))
    staged, real, sizes = [], [], []
    for p, base in zip(host.planes(), bases, strict=True):
        per_token = host.num_layers * p.row_bytes
        real.append(p.bases[0] + slots.numpy()[at] * per_token)
        staged.append(base + at * per_token)
        sizes.append(count * per_token)
    here, there, size = (torch.from_numpy(np.concatenate(x)) for x in (staged, real, sizes))
    return kvplan.Copies(here, there, size) if out else kvplan.Copies(there, here, size)


def _parts(n: int, most: int, tokens: int, out: bool) -> list[slice]:
    """`n` tokens in parts of `most`; to the device the last is small, as nothing is copied while it is scattered."""
    small = 0 if out else min(n, most // RAMP // tokens * tokens or most)
    ends = [*range(0, n - small, most), n - small, n] if small else [*range(0, n, most), n]
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


def transfer(src: KVPool, dst: KVPool, s: Tensor, d: Tensor, device: torch.device) -> None:
    """All layers of tokens `s` of src to `d` of dst, one of them a host pool that `stageable` allowed."""
    out = dst.device.type == "cpu"
    host, pool = (dst, src) if out else (src, dst)
    tokens, layers = granule(host), host.num_layers
    token_bytes = layers * sum(p.row_bytes for p in host.planes())
    per_chunk = (CHUNK_BYTES - 512) // token_bytes // tokens * tokens
    b, now = buffers(device), _current(device)
    host_slots, pool_slots = (d, s) if out else (s, d)
    uploaded = _copy.upload(pool_slots, device)
    if b.places.shape[0] < per_chunk:
        b.places = torch.arange(per_chunk, dtype=torch.int32, device=device)
    grid = 4 * multiprocessors(device.index if device.index is not None else -1)
    stages = _stage(host, b, per_chunk)
    engine = b.stream.cuda_stream if b.stream is not None else 0
    if b.stream is not None:
        b.stream.wait_stream(now)
    for i, part in enumerate(_parts(len(s), per_chunk, tokens, out)):
        buffer = i % 2
        stage = stages[buffer]
        here, there = b.places[: part.stop - part.start], uploaded[part]
        if out:
            _wait(now, b.free[buffer])
            _copy.plan(pool.planes(), stage.planes, pool.page_size, host.page_size, device).run(
                there, here, pool.num_slots, per_chunk, 0, layers, layers, grid
            )
            b.full[buffer].record(now)
            _wait(b.stream, b.full[buffer])
            _engine.copy(_pieces(host, tokens, host_slots[part], stage.bases, out), engine)
            b.free[buffer].record(b.stream)
        else:
            _wait(b.stream, b.free[buffer])
            _engine.copy(_pieces(host, tokens, host_slots[part], stage.bases, out), engine)
            b.full[buffer].record(b.stream)
            _wait(now, b.full[buffer])
            _copy.plan(stage.planes, pool.planes(), host.page_size, pool.page_size, device).run(
                here, there, per_chunk, pool.num_slots, 0, layers, layers, grid
            )
            b.free[buffer].record(now)
    if b.stream is not None:
        now.wait_stream(b.stream)


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
    run_bytes = per_token * len(slots) / (len(slots) // tokens - np.count_nonzero(_joined(slots, tokens)))
    total = host.num_layers * sum(p.row_bytes for p in host.planes()) * len(slots)
    table = costs(device.index or 0)["d2h" if host is dst else "h2d"]
    near = min(table, key=lambda r: abs(math.log2(r[0] / run_bytes)) + abs(math.log2(r[1] / total)))
    return "direct" if near[3] >= near[2] else "kernel"
