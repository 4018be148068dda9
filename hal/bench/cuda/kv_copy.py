# mypy: disable-error-code="arg-type, misc, no-any-return, unused-ignore"
"""The tables of what copies KV rows: between pools (kv_transfer) and within one (kv_move), beside SGLang's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.bench import OURS, Row, judge, launcher, peers, timing
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import Args, Build, ours, table_of
from hal.bench.cuda.kv_write import HEADS, write_row
from hal.kv.pool import KVPool

LAYERS = 32


# --- kv_transfer ------------------------------------------------------------------------------------


PAIRS = (("page_first", (1, 16, 64, 128), ("mha", "mla")), ("page_first_direct", (64,), ("mha",)))
"""Layout of the host's pool, page sizes, kinds of rows."""


def _kv_transfer(op: str, layout: str, kind: str, page: int) -> list[Row]:
    move = launcher("cuda", op)
    layers, row = 32, (8, 128) if kind == "mha" else (1, 576)
    slots, host_slots = 16384, 8192
    gpu = [inputs.randn(layers, slots, *row) for _ in range(2 if kind == "mha" else 1)]
    device = KVPool(*gpu, layout="layer_first", page_size=page)
    host = KVPool.host_like(device, host_slots, layout)
    rows = []
    for n in (64, 8192):
        nbytes = n * layers * row[0] * row[1] * 2 * len(gpu)
        there = (_host.randperm(slots // page)[:, None] * page + _host.arange(page)).view(-1)[:n]
        here = _host.arange(n)
        on_device = there.to(inputs.DEVICE), here.to(inputs.DEVICE)
        for direction in ("d2h", "h2d"):
            a, b = (device, host) if direction == "d2h" else (host, device)
            s, d = (there, here) if direction == "d2h" else (here, there)
            gs, gd = on_device if direction == "d2h" else on_device[::-1]
            flat, pinned = torch.empty(nbytes, dtype=torch.uint8, device=inputs.DEVICE), pinned_bytes(nbytes)
            calls: dict[str, Callable[[], Any]] = {
                "hal direct": partial(move, a, b, s, d, method="direct"),
                "hal kernel": partial(move, a, b, gs, gd, method="kernel"),
                "hal auto": partial(move, a, b, s, d),
            }
            if layout == "page_first":
                calls.update(_sglang_transfer(device, host, gs, gd, direction))
            for name, call in calls.items():
                judge.check_transfer(name, call, a, b, s, d)
            if direction == "h2d":  # the last check left these rows in it
                for half in gpu:
                    half.normal_()
            to, source = (pinned, flat) if direction == "d2h" else (flat, pinned)
            calls["memcpy"] = partial(to.copy_, source, non_blocking=True)
            about = {"op": op, "kind": kind, "layout": layout, "direction": direction, "page": page, "tokens": n}
            gbs = timing.wall_gbs(calls, nbytes, 5 if nbytes > (64 << 20) else 25)
            rows.append({**about, "bytes": nbytes, "gbs": gbs})
    return rows


def kv_transfer(quick: bool = False) -> list[Row]:
    """Rows: kind, direction, page size, tokens, GB/s of each and of one contiguous copy of as many bytes.

    By the wall clock. Device slots are whole pages in random order, host slots consecutive.
    """
    rows = []
    for layout, pages, kinds in PAIRS:
        for kind in kinds:
            for page in pages[::2] if quick else pages:
                rows += _kv_transfer("kv_transfer", layout, kind, page)
                timing.free_memory()
    return rows


_pinned_memory: dict[int, Tensor] = {}


def pinned_bytes(nbytes: int) -> Tensor:
    if nbytes not in _pinned_memory:
        _pinned_memory[nbytes] = _host.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return _pinned_memory[nbytes]


def _sglang_transfer(device: Any, host: Any, gs: Tensor, gd: Tensor, direction: str) -> dict[str, Callable[[], Any]]:
    module = peers.sglang("ops.kvcache.hicache")
    if module is None:
        return {}
    pointers = {
        pool: [torch.tensor(p.bases, dtype=torch.uint64, device=inputs.DEVICE) for p in pool.planes()]
        for pool in (device, host)
    }
    stride = {pool: pool.planes()[0].token_stride for pool in (device, host)}
    a, b = (device, host) if direction == "d2h" else (host, device)
    size = device.planes()[0].row_bytes
    tma = module._jit_hicache_tma_module(block_quota=module.TMA_BLOCK_QUOTA)
    if len(pointers[a]) == 2:
        (sk, sv), (dk, dv) = pointers[a], pointers[b]

        def run() -> None:
            tma.launch_all(dk, dv, gd, sk, sv, gs, stride[a], stride[b], size)
    else:

        def run() -> None:
            tma.launch_all_mla(pointers[b][0], gd, pointers[a][0], gs, stride[a], stride[b], size)

    return {"sglang tma": run}


# --- kv_move ----------------------------------------------------------------------------------------


def _by_layer(a: Args) -> Callable[[], None]:
    pool, src, dst = a["pool"], a["src_slots"], a["dst_slots"]
    layers = [x for half in (pool.k, pool.v) for x in half]

    def call() -> None:
        for x in layers:
            x.index_copy_(0, dst, x.index_select(0, src))

    return call


def _all_layers(k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> None:
    for x in (k, v):
        x.index_copy_(1, dst, x.index_select(1, src))


def _of_halves(fn: Callable[..., Any]) -> Build:
    return lambda a: partial(fn, a["pool"].k, a["pool"].v, a["src_slots"], a["dst_slots"])


def _sglang_move(a: Args) -> Callable[[], None]:
    """In chunks of 256 rows, as its pool does for rows of this size."""
    fn = peers.sglang("ops.kvcache.cache_move").copy_all_layer_kv_cache_func
    pool, n = a["pool"], a["src_slots"].shape[0]
    layers = [x for half in (pool.k, pool.v) for x in half]
    pointers = torch.tensor([x.data_ptr() for x in layers], dtype=torch.uint64, device=inputs.DEVICE)
    row = layers[0][0].nbytes
    strides = torch.full((len(layers),), row, dtype=torch.int64, device=inputs.DEVICE)
    config = {"bytes_per_tile": 128, "byte_tiles": -(-row // 128), "num_warps": 4}
    parts = [(a["dst_slots"][i : i + 256], a["src_slots"][i : i + 256], min(256, n - i)) for i in range(0, n, 256)]

    def call() -> None:
        for dst, src, count in parts:
            fn(pointers, strides, dst, src, count, 1 << (count - 1).bit_length(), config)

    return call


def _kv_move(op: str, rows: int, slots: str) -> Row:
    _, heads, dim = HEADS
    size = max(4 * rows, inputs.POOL // (2 * LAYERS * heads * dim * 2))
    k, v = (inputs.randn(LAYERS, size, heads, dim) for _ in range(2))
    pool = KVPool(k, v, layout="layer_first")
    unit = rows * max(p.row_bytes for p in pool.planes())
    whole = torch.empty(2 * LAYERS * unit, dtype=torch.uint8, device=inputs.DEVICE)
    sets: list[Args] = []
    for _ in range(4):
        found = inputs.slots(2 * rows, size)
        src = found[:rows]
        dst = found[rows:] if slots == "apart" else src.roll(-1)
        sets.append({"pool": pool, "src_slots": src.contiguous(), "dst_slots": dst.contiguous(), "workspace": whole})
    torch._dynamo.reset()
    builds: dict[str, Build] = {
        OURS: ours(op),
        "hal, workspace for one layer": lambda a: partial(launcher("cuda", op), **{**a, "workspace": whole[:unit]}),
        "eager by layer": _by_layer,
        "eager, all layers": _of_halves(_all_layers),
        "torch.compile": _of_halves(torch.compile(_all_layers, dynamic=False)),
    }
    if "sglang" in peers.available():
        builds["sglang"] = _sglang_move
    return write_row({"op": op, "rows": rows, "slots": slots}, sets, 2 * 2 * LAYERS * unit, builds, heavy=True)


def kv_move(quick: bool = False) -> list[Row]:
    """Rows: how many, and whether sources and targets are ``apart`` or the targets are the sources in another order
    (``cycle``). The GB/s count each row once read and once written: a move through a workspace does both twice.
    """
    cases = [(n, s) for n in ((64,) if quick else (64, 1024)) for s in ("apart", "cycle")]
    return table_of(partial(_kv_move, op="kv_move", rows=n, slots=s) for n, s in cases)


TABLES: dict[str, Callable[[bool], list[Row]]] = {"kv_transfer": kv_transfer, "kv_move": kv_move}
