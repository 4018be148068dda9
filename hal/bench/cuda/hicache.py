# mypy: disable-error-code="arg-type, misc, no-any-return, union-attr, unused-ignore"
"""The table of SGLang's HiCache: its host pools' two methods on hal, beside its JIT kernels, which they call where
those can be built, `sgl_kernel`'s copies, which they call elsewhere, and memcpy.

A load is a call a layer, all layers one after another; a backup is one call. What hal's adapter replaces is what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.bench import OURS, Row, judge, peers, timing
from hal.bench.cuda import inputs
from hal.bench.cuda.kv_copy import pinned_bytes
from hal.engines.sglang import hicache as adapter
from hal.kv.pool import KVPool

KINDS = {"mha": (32, (8, 128), 2), "mla": (61, (1, 576), 1)}
"""Layers, a token's row, and halves: Llama-3.1-8B's, DeepSeek-V3's; bf16."""
PAGES = (1, 16, 64)
SLOTS = 8192
FEW, MANY = 256, 4096
LAUNCH = (2, 32)
"""`sgl_kernel`'s own defaults: blocks, and warps of a block."""
STAGED = "page_first", "backup"
STAGED_PAGES = 64
"""What SGLang's host pool has a buffer for on the device, and of how many pages."""


def _ours(kind: str, device: KVPool, host: KVPool) -> SimpleNamespace:
    """What of SGLang's host pool the adapter reads."""
    made = SimpleNamespace(layout=host.layout, page_size=host.page_size)
    names = ("k_buffer", "v_buffer") if kind == "mha" else ("kv_buffer",)
    for name, near, far in zip(names, (device.k, device.v), (host.k, host.v), strict=False):
        setattr(made, name, far)
        setattr(made, f"device_{name}s", list(near))
    return made


def _adapter(host: SimpleNamespace, way: str, layers: int, there: Tensor, here: Tensor) -> None:
    if way == "backup":
        adapter.backup_from_device_all_layer(host, None, here, there, "kernel")
        return
    for layer in range(layers):
        adapter.load_to_device_per_layer(host, None, here, there, layer, "kernel")


def _peers(way: str, device: KVPool, host: KVPool, slots: tuple[Tensor, ...]) -> dict[str, Callable[[], Any]]:
    """`sgl_kernel`'s calls of the same copies, as SGLang makes them.

    Args:
        slots: the device's and the host's, on the device; then both on the CPU.
    """
    ops = peers.sgl_kernel()
    if ops is None:
        return {}
    there, here, there_cpu, here_cpu = slots
    item, layers = device.planes()[0].row_bytes, device.num_layers
    near, far = (tuple(t for t in (p.k, p.v) if t is not None) for p in (device, host))
    mla = "" if len(near) == 2 else "_mla"
    calls: dict[str, Callable[[], Any]] = {}
    paged = host.layout == "page_first"

    def of(name: str) -> Callable[..., Any]:
        return getattr(ops, name).default

    if way == "load":
        run = of(f"transfer_kv_per_layer{mla}{'_pf_lf' if paged else ''}")

        def load() -> None:
            for i in range(layers):
                pairs = [x for a, b in zip(far, near, strict=True) for x in (a if paged else a[i], b[i])]
                where = (i, item, item * layers) if paged else (item,)
                run(*pairs, here, there, *where, *LAUNCH)

        calls["sgl_kernel"] = load
    else:
        run = of(f"transfer_kv_all_layer{mla}{'_lf_pf' if paged else ''}")
        tables = [_table(t) for t in near]
        into = far if paged else tuple(_table(t) for t in far)
        pairs = [x for a, b in zip(tables, into, strict=True) for x in (a, b)]
        where = (item, item * layers, layers) if paged else (item, layers)
        calls["sgl_kernel"] = partial(run, *pairs, there, here, *where, *LAUNCH)
    if not paged and host.page_size > 1:  # a copy a token takes seconds
        a, b = [t[i] for t in far for i in range(layers)], [t[i] for t in near for i in range(layers)]
        direct, page = of("transfer_kv_direct"), host.page_size
        if way == "load":

            def load_direct() -> None:
                for i in range(layers):
                    direct(a[i::layers], b[i::layers], here_cpu, there_cpu, page)

            calls["sgl_kernel direct"] = load_direct
        else:
            calls["sgl_kernel direct"] = partial(direct, b, a, there_cpu, here_cpu, page)
    return calls


def _jit(way: str, device: KVPool, host: KVPool, slots: tuple[Tensor, ...]) -> dict[str, Callable[[], Any]]:
    """SGLang's JIT kernels of the same copies, as its host pools call them: to page_first by a staging buffer."""
    ops = peers.sglang("ops.kvcache.hicache")
    if ops is None:
        return {}
    there, here, _, here_cpu = slots
    item, layers = device.planes()[0].row_bytes, device.num_layers
    dim, first = item // device.dtype.itemsize, host.layout == "page_first"
    near, far = (tuple(t for t in (p.k, p.v) if t is not None) for p in (device, host))
    mla = "" if len(near) == 2 else "_mla"
    views = [t.transpose(0, 1) if first else t for t in far]
    if way == "load":
        run = getattr(ops, f"transfer_hicache_one_layer{mla}")

        def load() -> None:
            for i in range(layers):
                run(*(t[i] for t in near), there, *(t[i] for t in views), here, element_dim=dim)

        return {"sglang jit": load}
    tables = [_table(t) for t in near]
    if first:
        run = getattr(ops, f"transfer_hicache_all_layer{mla}_staged_lf_pf")
        pages = min(STAGED_PAGES, host.num_slots // host.page_size)
        staged = [torch.empty(pages * host.page_size, *t.shape[1:], dtype=t.dtype, device=inputs.DEVICE) for t in far]
        return {"sglang jit": partial(run, *tables, there, here_cpu, *staged, *far, page_size=host.page_size)}
    run = getattr(ops, f"transfer_hicache_all_layer{mla}")
    strides = {f"{'cache' if mla else 'kv_cache'}_{side}_stride_bytes": item for side in ("src", "dst")}
    into = [_table(t) for t in far]
    return {"sglang jit": partial(run, *into, here, *tables, there, **strides, element_size=item)}


def _table(layers: Tensor) -> Tensor:
    return torch.tensor([t.data_ptr() for t in layers], dtype=torch.uint64, device=inputs.DEVICE)


def _slots(page: int, n: int, scattered: bool) -> Tensor:
    pages = _host.randperm(SLOTS // page)[: n // page] if scattered else _host.arange(n // page)
    return (pages[:, None] * page + _host.arange(page)).view(-1)


def _row(kind: str, way: str, device: KVPool, host: KVPool, n: int, scattered: bool) -> Row:
    layers, row, halves = KINDS[kind]
    there, here = _slots(host.page_size, n, True), _slots(host.page_size, n, scattered)
    on_device = there.to(inputs.DEVICE), here.to(inputs.DEVICE)
    there_gpu, here_gpu = on_device
    nbytes = n * layers * row[0] * row[1] * 2 * halves
    flat = torch.empty(nbytes, dtype=torch.uint8, device=inputs.DEVICE)
    pinned = pinned_bytes(nbytes)
    ours = _ours(kind, device, host)
    calls: dict[str, Callable[[], Any]] = {
        # Of these SGLang leaves the host's slots where they are.
        OURS: partial(_adapter, ours, way, layers, there_gpu, here if (host.layout, way) == STAGED else here_gpu),
        "hal, slots on the CPU": partial(_adapter, ours, way, layers, there, here),
        **_jit(way, device, host, (*on_device, there, here)),
        **_peers(way, device, host, (*on_device, there, here)),
    }
    a, b, s, d = (host, device, here, there) if way == "load" else (device, host, there, here)
    for half in a.tensors:  # the check of the other way left one value in it
        half.copy_(inputs.randn(*half.shape))
    for name, call in calls.items():
        judge.check_transfer(name, call, a, b, s, d)
    to, source = (flat, pinned) if way == "load" else (pinned, flat)
    calls["memcpy"] = partial(to.copy_, source, non_blocking=True)
    about = {"op": "hicache", "kind": kind, "layout": host.layout, "way": way, "page": host.page_size}
    slots = "scattered" if scattered else "in order"
    gbs = timing.wall_gbs(calls, nbytes, 7 if n == MANY else 25)
    short = {name: lambda i, call=call: call() for name, call in calls.items() if "direct" not in name}
    host_us = timing.host_us(short, count=40) if n == FEW else {}
    return {**about, "tokens": n, "host slots": slots, "bytes": nbytes, "wall_gbs": gbs, "host_us": host_us}


def hicache(quick: bool = False) -> list[Row]:
    """Rows: kind, host layout, way, page size, tokens, host slots consecutive or scattered; GB/s by the wall clock.

    Device slots are whole pages in random order.
    """
    rows = []
    for kind, (layers, row, halves) in KINDS.items():
        gpu = [inputs.randn(layers, SLOTS, *row) for _ in range(halves)]
        for layout in ("layer_first", "page_first"):
            made = KVPool.host_like(KVPool(*gpu), SLOTS, layout)
            for page in PAGES[1:2] if quick else PAGES:
                device = KVPool(*gpu, page_size=page)
                host = KVPool(made.k, made.v, layout=layout, page_size=page)
                for way in ("backup", "load"):
                    for n, scattered in ((MANY, False), (FEW, False), *([(MANY, True)] if page == 16 else [])):
                        rows.append(_row(kind, way, device, host, n, scattered))
            del made, device, host
            timing.free_memory()
    return rows


TABLES: dict[str, Callable[[bool], list[Row]]] = {"hicache": hicache}
