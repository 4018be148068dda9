# mypy: disable-error-code="no-untyped-call, misc, call-arg, arg-type, attr-defined, no-any-return, unused-ignore"
# torch.cuda has untyped streams and events, and calls are passed on as *args.
"""The tables of `hal bench --device cuda`: ours and every importable peer, in one run.

Device time: the median over CUDA-graph replays of many calls on rotating inputs, implementations
interleaved. Host time: the median of single calls without a sync. Outputs are compared with the op's
reference before anything is timed. kv_transfer goes by the wall clock, sync to sync.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._errors import HalError
from hal.bench import peers

Calls = Mapping[str, Callable[[int], Any]]
"""Implementation -> call on the i-th set of inputs."""
Row = dict[str, Any]


# --- measuring --------------------------------------------------------------------------------------


def device_us(calls: Calls, sets: int, per_graph: int = 96, rounds: int = 25) -> dict[str, float]:
    """Median microseconds of device time per call, by replay of graphs of `per_graph` calls."""
    graphs = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            for i in range(min(sets, 3)):
                call(i)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(per_graph):
                    call(i % sets)
            graphs[name] = graph
        times: dict[str, list[float]] = {name: [] for name in calls}
        for r in range(rounds + 3):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if r >= 3:
                    times[name].append(start.elapsed_time(end) * 1000 / per_graph)
    return {name: statistics.median(t) for name, t in times.items()}


def host_us(calls: Calls, sets: int = 1, count: int = 300) -> dict[str, float]:
    """Median microseconds that one call keeps the host, not waiting for the device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(4):
        for name, call in calls.items():
            torch.cuda.synchronize()
            for i in range(count // 4):
                begin = time.perf_counter()
                call(i % sets)
                times[name].append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return {name: statistics.median(t) * 1e6 for name, t in times.items()}


def wall_gbs(calls: Mapping[str, Callable[[], Any]], nbytes: int, rounds: int = 5) -> dict[str, float]:
    """Median GB/s by the wall clock, from an idle device to an idle device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for r in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if r:
                times[name].append(time.perf_counter() - begin)
    return {name: nbytes / statistics.median(t) / 1e9 for name, t in times.items()}


def copy_gbs(nbytes: int = 1 << 31) -> float:
    """GB/s of a device-to-device copy, read and written bytes counted: the ceiling."""
    a = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    b = torch.empty_like(a)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * nbytes / statistics.median(times) / 1e6


# --- get_last_loc, assign_extend_cache_locs ---------------------------------------------------------


def get_last_loc(
    sizes: Iterable[int] = (1, 32, 256, 1024, 4096), table: tuple[int, int] = (4096, 8192)
) -> list[Row]:
    """Rows: bs, device and host microseconds of each."""
    from hal.backends.cuda.get_last_loc import get_last_loc as ours
    from hal.ops.get_last_loc import get_last_loc as reference

    tokens = torch.randint(0, 1 << 20, table, dtype=torch.int32, device="cuda")
    theirs = peers.sglang("ops.memory.common")
    out = []
    for bs in sizes:
        data = [
            (tokens, _host.randint(0, table[0], (bs,)).cuda(), _host.randint(1, table[1] + 1, (bs,)).cuda())
            for _ in range(16)
        ]  # fmt: skip
        impls: dict[str, Callable[..., Any]] = {"hal": ours}
        if theirs is not None:
            impls["sglang"] = theirs.get_last_loc_triton
        for fn in impls.values():
            assert torch.equal(fn(*data[0]), reference(*data[0]))
        calls = {name: (lambda i, fn=fn, data=data: fn(*data[i])) for name, fn in impls.items()}
        out.append(
            {"op": "get_last_loc", "bs": bs, "device_us": device_us(calls, 16), "host_us": host_us(calls, 16)}
        )
    return out


def _extend_inputs(bs: int, lengths: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    rows, width = tokens.shape
    start = (_host.rand(bs) * (width - lengths).clamp(min=0)).long()
    out = torch.empty(int(lengths.sum()), dtype=torch.int64, device="cuda")
    return (
        tokens,
        torch.randint(0, rows, (bs,), device="cuda", dtype=torch.int64),
        start.cuda(),
        (start + lengths).cuda(),
        out,
    )


def assign_extend_cache_locs(
    sizes: Iterable[int] = (1, 32, 256, 1024, 4096),
    kinds: Iterable[str] = ("4 each", "ragged to 64", "one long row"),
) -> list[Row]:
    """Rows: kind, bs, device and host microseconds of each."""
    from hal.backends.cuda.assign_extend_cache_locs import assign_extend_cache_locs as ours
    from hal.ops.assign_extend_cache_locs import assign_extend_cache_locs as reference

    tokens = torch.randint(0, 1 << 20, (4096, 8192), dtype=torch.int32, device="cuda")
    theirs = peers.sglang("ops.speculative.cache_locs")

    def sglang(table: Tensor, requests: Tensor, start: Tensor, end: Tensor, out: Tensor) -> None:
        bs = requests.numel()
        theirs.assign_extend_cache_locs[(bs,)](
            requests, table, start, end, out, table.shape[1], 1 << max(0, bs - 1).bit_length()
        )

    out = []
    for kind in kinds:
        for bs in sizes:
            if kind == "one long row" and bs > 32:
                continue
            data = []
            for _ in range(8):
                if kind == "4 each":
                    lengths = _host.full((bs,), 4)
                elif kind == "ragged to 64":
                    lengths = _host.randint(1, 65, (bs,))
                else:
                    lengths = _host.ones(bs, dtype=torch.int64)
                    lengths[bs // 2] = 8000
                data.append(_extend_inputs(bs, lengths, tokens))
            impls: dict[str, Callable[..., Any]] = {"hal": ours}
            if theirs is not None:
                impls["sglang"] = sglang
            want = reference(*data[0][:4], data[0][4].clone())
            for fn in impls.values():
                data[0][4].fill_(-7)
                fn(*data[0])
                assert torch.equal(data[0][4], want)
            calls = {name: (lambda i, fn=fn, data=data: fn(*data[i])) for name, fn in impls.items()}
            out.append({
                "op": "assign_extend_cache_locs", "kind": kind, "bs": bs,
                "device_us": device_us(calls, 8), "host_us": host_us(calls, 8),
            })  # fmt: skip
    return out


# --- rope_kv_write ----------------------------------------------------------------------------------

SHAPES = {
    "llama3-8b": (32, 8, 128), "llama3-70b-tp8": (8, 1, 128), "llama3-70b": (64, 8, 128), "qwen3-30b-a3b": (32, 4, 128),
}  # fmt: skip


class RopeInputs:
    """Sets of inputs of one size, their slots spread over a pool of 0.5-1 GiB."""

    def __init__(self, tokens: int, shape: tuple[int, int, int], cache: torch.dtype = torch.bfloat16) -> None:
        hq, hk, d = shape
        self.tokens, self.shape = tokens, shape
        self.sets = max(3, min(16, (256 << 20) // max(1, tokens * (hq + 2 * hk) * d * 2)))
        slots = (256 << 20) // (hk * d)
        angle = torch.rand(32768, d // 2, device="cuda", dtype=torch.float32) * 6.3
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], dim=-1)
        self.k_cache = torch.zeros(slots, hk, d, dtype=torch.bfloat16, device="cuda").to(cache)
        self.v_cache = torch.zeros_like(self.k_cache)

        def new(h: int) -> Tensor:
            return torch.randn(tokens, h, d, device="cuda", dtype=torch.float32).to(torch.bfloat16)

        self.qkv = [(new(hq), new(hk), new(hk)) for _ in range(self.sets)]
        self.positions = [
            torch.randint(0, 32768, (tokens,), device="cuda", dtype=torch.int64) for _ in range(self.sets)
        ]
        self.slots = [
            torch.randperm(slots, device="cuda", dtype=torch.int64)[:tokens] for _ in range(self.sets)
        ]

    def bytes(self) -> int:
        """What must move: q and k read and written, v read, the caches' rows written."""
        hq, hk, d = self.shape
        return self.tokens * d * (4 * hq + 4 * hk + 2 * hk + 2 * hk * self.k_cache.element_size())


def rope_calls(x: RopeInputs, scale: float | None = None) -> dict[str, Callable[[int], Any]]:
    """Ours and the peers' on these inputs."""
    from hal.backends.cuda.rope_kv_write import rope_kv_write as ours

    def hal(i: int) -> None:
        ours(
            *x.qkv[i],
            x.cos_sin,
            x.positions[i],
            x.k_cache,
            x.v_cache,
            x.slots[i],
            k_scale=scale,
            v_scale=scale,
        )

    calls: dict[str, Callable[[int], Any]] = {"hal": hal}
    theirs = peers.sglang("ops.attention.rope")
    if theirs is not None:
        d = x.shape[2]
        module = theirs._jit_fused_rope_module(True, d, torch.bfloat16, torch.bfloat16)
        if x.k_cache.dtype == torch.bfloat16:
            flat_k, flat_v = x.k_cache.view(x.k_cache.shape[0], -1), x.v_cache.view(x.v_cache.shape[0], -1)

            def sglang(i: int) -> None:
                q, k, v = x.qkv[i]
                module.run_rope_store(q, k, v, flat_k, flat_v, x.cos_sin, x.positions[i], x.slots[i])

            calls["sglang jit fused"] = sglang
    return calls


def rope_kv_write(
    cases: Mapping[str, Iterable[int]] | None = None, cache: torch.dtype = torch.bfloat16, host: bool = True
) -> list[Row]:
    """Rows: model, tokens, device and host microseconds, GB/s of ours."""
    from hal.ops.rope_kv_write import rope_kv_write as reference

    cases = cases or {
        "llama3-8b": (1, 8, 32, 128, 512, 2048, 8192), "llama3-70b-tp8": (1, 32, 512, 8192),
        "llama3-70b": (1, 32, 512), "qwen3-30b-a3b": (1, 32, 512, 4096),
    }  # fmt: skip
    scale = None if cache == torch.bfloat16 else 0.5
    out = []
    for model, sizes in cases.items():
        for tokens in sizes:
            x = RopeInputs(tokens, SHAPES[model], cache)
            calls = rope_calls(x, scale)
            _check_rope(x, calls, reference, scale)
            row = {
                "op": "rope_kv_write", "model": model, "tokens": tokens, "cache": str(cache).removeprefix("torch."),
                "device_us": device_us(calls, x.sets, per_graph=96 if tokens <= 512 else 24),
                "host_us": host_us(calls, x.sets) if host and tokens == 1 else None, "bytes": x.bytes(),
            }  # fmt: skip
            row["gbs"] = {n: x.bytes() / us / 1e3 for n, us in row["device_us"].items()}
            out.append(row)
            del x, calls
            torch.cuda.empty_cache()
    return out


def _check_rope(x: RopeInputs, calls: Calls, reference: Callable[..., Any], scale: float | None) -> None:
    saved = [t.clone() for t in x.qkv[0]]
    want = [t.double() for t in saved]
    rows = x.slots[0]
    wide = x.cos_sin.double()[x.positions[0]].unsqueeze(1)
    cos, sin = wide.chunk(2, dim=-1)
    for t in want[:2]:
        a, b = t.chunk(2, dim=-1)
        t.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    for name, call in calls.items():
        for t, s in zip(x.qkv[0], saved, strict=True):
            t.copy_(s)
        call(0)
        for t, w in zip(x.qkv[0], want, strict=True):
            error = float((t.double() - w).norm() / w.norm())
            assert error < 3e-3, f"{name}: {error}"
        for cache, w in ((x.k_cache, want[1]), (x.v_cache, want[2])):
            got = cache.view(torch.uint8)[rows].view(cache.dtype).double() * (scale or 1.0)
            error = float((got - w).norm() / w.norm())
            assert error < (3e-3 if scale is None else 4e-2), f"{name}: cache {error}"
    del reference


# --- kv_transfer ------------------------------------------------------------------------------------


def kv_transfer(
    tokens: Iterable[int] = (64, 8192), pages: Iterable[int] = (1, 16, 64, 128), kinds: Iterable[str] = ("mha", "mla"),
    layout: str = "page_first",
) -> list[Row]:  # fmt: skip
    """Rows: kind, direction, page size, tokens, GB/s of each and of one contiguous copy of as many bytes.

    Device slots are whole pages in random order, host slots consecutive.
    """
    from hal.backends.cuda.kv_transfer import kv_transfer as ours
    from hal.kv.pool import KVPool

    out = []
    for kind in kinds:
        layers, row = 32, (8, 128) if kind == "mha" else (1, 576)
        for page in pages:
            slots, host_slots = 16384, 8192
            gpu = [
                torch.randn(layers, slots, *row, device="cuda", dtype=torch.float32).to(torch.bfloat16)
                for _ in range(2 if kind == "mha" else 1)
            ]
            device = KVPool(*gpu, layout="layer_first", page_size=page)
            host = KVPool.host_like(device, host_slots, layout)
            half = layers * row[0] * row[1] * 2
            for n in tokens:
                nbytes = n * half * len(gpu)
                there = (_host.randperm(slots // page)[:, None] * page + _host.arange(page)).view(-1)[:n]
                here = _host.arange(n)
                on_device = there.cuda(), here.cuda()
                for direction in ("d2h", "h2d"):
                    a, b = (device, host) if direction == "d2h" else (host, device)
                    s, d = (there, here) if direction == "d2h" else (here, there)
                    gs, gd = on_device if direction == "d2h" else on_device[::-1]
                    flat, pinned = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), _pinned(nbytes)
                    calls: dict[str, Callable[[], Any]] = {
                        "hal direct": lambda a=a, b=b, s=s, d=d: ours(a, b, s, d, method="direct"),
                        "hal kernel": lambda a=a, b=b, gs=gs, gd=gd: ours(a, b, gs, gd, method="kernel"),
                        "hal auto": lambda a=a, b=b, s=s, d=d: ours(a, b, s, d),
                    }
                    if layout == "page_first":
                        calls.update(_sglang_transfer(device, host, gs, gd, direction))
                    _check_transfer(calls, device, host, there, here, direction)
                    copy = (pinned, flat) if direction == "d2h" else (flat, pinned)
                    calls["memcpy"] = lambda copy=copy: copy[0].copy_(copy[1], non_blocking=True)
                    rounds = 5 if nbytes > (64 << 20) else 25
                    out.append({
                        "op": "kv_transfer", "kind": kind, "layout": layout, "direction": direction, "page": page,
                        "tokens": n, "bytes": nbytes, "gbs": wall_gbs(calls, nbytes, rounds),
                    })  # fmt: skip
            del device, host, gpu
    return out


_pinned_memory: dict[int, Tensor] = {}


def _pinned(nbytes: int) -> Tensor:
    if nbytes not in _pinned_memory:
        _pinned_memory[nbytes] = _host.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return _pinned_memory[nbytes]


def _sglang_transfer(
    device: Any, host: Any, gs: Tensor, gd: Tensor, direction: str
) -> dict[str, Callable[[], Any]]:
    module = peers.sglang("ops.kvcache.hicache")
    if module is None:
        return {}
    pointers = {
        pool: [torch.tensor(p.bases, dtype=torch.uint64, device="cuda") for p in pool.planes()]
        for pool in (device, host)
    }  # fmt: skip
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


def _check_transfer(
    calls: Mapping[str, Callable[[], Any]],
    device: Any,
    host: Any,
    there: Tensor,
    here: Tensor,
    direction: str,
) -> None:
    n = min(512, there.numel())
    for name, call in calls.items():
        target = host if direction == "d2h" else device
        target.k.view(torch.int16).fill_(-1)
        call()
        torch.cuda.synchronize()
        for layer in (0, device.num_layers - 1):
            got = device.layer(layer)[0].view(torch.int16)[there[:n].cuda()].cpu()
            rows = host.layer(layer)[0].view(torch.int16).reshape(host.num_slots, *got.shape[1:])
            assert torch.equal(got, rows[here[:n]]), f"{name}: wrong rows"
        if direction == "h2d":
            device.k.normal_()


# --- bookkeeping ------------------------------------------------------------------------------------


def bookkeeping(
    sizes: Iterable[int] = (1, 32, 256, 1024, 4096), page: int = 16, only: Sequence[str] = ()
) -> list[Row]:
    """Rows: op, bs, device and host microseconds of each op that an engine calls around a batch, or of `only` these.

    Up to 64 new tokens a request (one for alloc_decode), up to 1024 keys for build_kv_indices and build_page_table.
    SGLang's kernels of the same name, on the same work; its create_flashinfer_kv_indices is given kv_indptr, which ours
    makes: ``with cumsum`` is what it takes with torch's sum before it, as SGLang does. It makes page tables by torch.
    """
    from hal import ops

    memory, allocator = peers.sglang("ops.memory.common"), peers.sglang("ops.memory.allocator")
    indices, positions = peers.sglang("ops.attention.kv_indices"), peers.sglang("ops.attention.position")
    table = torch.randint(0, 1 << 20, (4096, 8192), dtype=torch.int32, device="cuda")
    stride = table.shape[1]
    out: list[Row] = []

    def measure(
        op: str,
        bs: int,
        ours: list[tuple[Any, ...]],
        theirs: Callable[..., None],
        at: int | None,
        peer: str = "sglang",
    ) -> None:
        """`at`: which argument is written; None: the table. `peer`: who wrote `theirs`."""
        if only and op not in only:
            return
        spec = ops.get_spec(op)
        mine = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
        args = ours[0]
        wrote = table if at is None else args[at]
        before = wrote.clone()
        spec.reference(*args)
        want = wrote.clone()
        calls: dict[str, Callable[[int], Any]] = {"hal": lambda i: mine(*ours[i])}
        if memory is not None or peer != "sglang":
            calls[peer] = lambda i: theirs(*ours[i])
        if memory is not None and op == "build_kv_indices":

            def summed(i: int) -> None:
                torch.cumsum(ours[i][2], 0, dtype=torch.int32, out=ours[i][3][1:])
                theirs(*ours[i])

            calls["sglang with cumsum"] = summed
        for name, call in calls.items():
            wrote.copy_(before)
            call(0)
            assert torch.equal(wrote, want), f"{op}: {name}"
        times = device_us(calls, len(ours), per_graph=48 if bs <= 256 else 24)
        out.append({"op": op, "bs": bs, "device_us": times, "host_us": host_us(calls, len(ours), 200)})

    def positions_of(prefix: Tensor, seq: Tensor, flat: Tensor) -> None:
        starts = torch.empty_like(prefix, dtype=torch.int32)
        positions.compute_position_kernel[(prefix.numel(),)](flat, starts, prefix, seq - prefix, True)

    for bs in sizes:
        upper = 1 << max(0, bs - 1).bit_length()
        sets: dict[str, list[tuple[Any, ...]]] = {}
        for _ in range(4):
            prefix = torch.randint(0, 4096, (bs,), device="cuda", dtype=torch.int64)
            seq = prefix + torch.randint(1, 65, (bs,), device="cuda", dtype=torch.int64)
            total = int((seq - prefix).sum())
            last = (
                torch.randint(0, 1 << 16, (bs,), device="cuda", dtype=torch.int64) * page
                + (prefix - 1) % page
            )
            free = torch.randperm(1 << 18, device="cuda", dtype=torch.int64)
            flat = torch.zeros(total, dtype=torch.int64, device="cuda")
            requests, zero = (
                torch.randperm(4096, device="cuda", dtype=torch.int64)[:bs],
                torch.zeros_like(prefix),
            )
            keys = torch.randint(1, 1025, (bs,), device="cuda", dtype=torch.int64)
            indptr = torch.zeros(bs + 1, dtype=torch.int32, device="cuda")
            indptr[1:] = keys.cumsum(0)
            packed = torch.zeros(int(keys.sum()), dtype=torch.int32, device="cuda")
            for op, args in {
                "alloc_decode": (prefix + 1, last, free, page, torch.zeros_like(prefix)),
                "alloc_extend": (prefix, seq, last, free, page, flat),
                "write_req_to_token": (
                    table,
                    requests,
                    zero,
                    seq - prefix,
                    torch.randint_like(flat, 1 << 20),
                ),
                "compute_positions": (prefix, seq, flat),
                "build_kv_indices": (table, requests, keys, indptr, packed),
                "build_page_table": (
                    table,
                    requests,
                    keys,
                    page,
                    torch.zeros(bs, 1024 // page, dtype=torch.int32, device="cuda"),
                ),
            }.items():
                sets.setdefault(op, []).append(args)
        measure(
            "alloc_decode", bs, sets["alloc_decode"],
            lambda seq, last, free, page, flat, u=upper: allocator.alloc_decode_kernel[(len(seq),)](
                seq, last, free, flat, u, page
            ), 4,
        )  # fmt: skip
        measure(
            "alloc_extend", bs, sets["alloc_extend"],
            lambda prefix, seq, last, free, page, flat, u=upper: allocator.alloc_extend_kernel[(len(seq),)](
                prefix, seq, last, free, flat, u, page
            ), 5,
        )  # fmt: skip
        measure(
            "write_req_to_token", bs, sets["write_req_to_token"],
            lambda table, requests, start, end, src: memory.write_req_to_token_pool_triton[(len(requests),)](
                table, requests, start, start, end, end, src, stride
            ), None,
        )  # fmt: skip
        measure("compute_positions", bs, sets["compute_positions"], positions_of, 2)
        measure(
            "build_kv_indices", bs, sets["build_kv_indices"],
            lambda table, requests, keys, indptr, packed: indices.create_flashinfer_kv_indices_triton[(len(keys),)](
                table, requests, keys, indptr, None, packed, stride
            ), 4,
        )  # fmt: skip
        measure("build_page_table", bs, sets["build_page_table"], torch_page_table, 4, "torch")
    return out


def torch_page_table(table: Tensor, requests: Tensor, keys: Tensor, page: int, out: Tensor) -> None:
    """As SGLang makes it: every page's first slot, gathered and divided."""
    first = torch.arange(out.shape[1], dtype=torch.int64, device=out.device) * page
    found = table[requests[:, None], first] // page
    out.copy_(torch.where(first < keys[:, None], found, -1))


# --- programmatic launch ----------------------------------------------------------------------------


def programmatic_launch() -> list[Row]:
    """Rows: device microseconds of ops back to back, launched programmatically (``hal``) and not (``without``)."""
    from hal.triton import launch

    tokens = torch.randint(0, 1 << 20, (4096, 8192), dtype=torch.int32, device="cuda")
    index = torch.arange(32, device="cuda", dtype=torch.int64)
    packed = torch.empty(128, dtype=torch.int64, device="cuda")
    cases: dict[tuple[str, str], Callable[[], tuple[Any, ...]]] = {
        ("get_last_loc", "bs 32"): lambda: (tokens, index, index + 1),
        ("assign_extend_cache_locs", "bs 32, 4 each"): lambda: (tokens, index, index, index + 4, packed),
        ("compute_positions", "bs 32, 4 each"): lambda: (index, index + 4, packed),
    }
    for n in (1, 32, 512, 2048):
        x = RopeInputs(n, SHAPES["llama3-8b"])
        cases["rope_kv_write", f"llama3-8b, {n} tokens"] = lambda x=x: (
            *x.qkv[0], x.cos_sin, x.positions[0], x.k_cache, x.v_cache, x.slots[0],
        )  # fmt: skip
    out = []
    for (op, case), make in cases.items():
        module = importlib.import_module(f"hal.backends.cuda.{op}")
        # The kernels over ragged requests are bound by what they share.
        binder = module if hasattr(module, "pdl") else importlib.import_module("hal.backends.cuda._spans")
        fn, args, rule = getattr(module, op), make(), binder.pdl
        times: dict[str, float] = {}
        for name, on in (("hal", rule), ("without", lambda device: False)):
            binder.pdl = on
            launch.forget()
            times |= device_us({name: lambda i, fn=fn, args=args: fn(*args)}, 1)
        binder.pdl = rule
        launch.forget()
        out.append({"op": "programmatic launch", "of": op, "case": case, "device_us": times})
    return out


# --- the launcher -----------------------------------------------------------------------------------


def launcher() -> list[Row]:
    """Rows: host microseconds of one launch, by Triton and by hal, of an empty kernel."""
    from hal.bench import _empty

    x = torch.zeros(64, device="cuda", dtype=torch.float32)
    out = []
    for name, kernel, args in (
        ("4 pointers, 2 ints", _empty.small, (x, x, x, x, 7, 48)),
        ("10 pointers, 9 ints", _empty.large, (x,) * 10 + (7, 48, 5, 6, 128, 9, 33, 64, 1000)),
    ):
        bound = kernel.bind(BLOCK=128, num_warps=4)
        compiled = kernel.jit[(1,)](*args, BLOCK=128, num_warps=4)
        stream = torch.cuda.current_stream().cuda_stream
        pointers = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        head = (
            stream,
            compiled.function,
            False,
            False,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )
        calls: dict[str, Callable[[int], Any]] = {
            "triton": lambda i, k=kernel, a=args: k.jit[(1,)](*a, BLOCK=128, num_warps=4),
            "hal": lambda i, b=bound, a=args: b.start((1, 1, 1), *a),
            "triton's C launcher": lambda i, c=compiled.run.launch, h=head, p=pointers: c(
                1, 1, 1, *h, *p, None
            ),
        }
        for call in calls.values():
            call(0)
        out.append({"op": "launch", "arguments": name, "host_us": host_us(calls, 1, 2000)})
    return out


# --- all of it --------------------------------------------------------------------------------------


def tables(quick: bool = False) -> dict[str, Any]:
    """Every table, with what it was measured on."""
    import datetime

    import triton

    from hal.bench import block_table
    from hal.triton.launch import status

    properties = torch.cuda.get_device_properties(0)
    rows = [*launcher(), *get_last_loc(), *assign_extend_cache_locs(), *bookkeeping(), *programmatic_launch()]
    rows += block_table.expand()
    rows += rope_kv_write()
    rows += rope_kv_write({"llama3-8b": (1, 32, 512, 4096)}, torch.float8_e4m3fn, host=False)
    rows += kv_transfer(pages=(1, 64) if quick else (1, 16, 64, 128))
    rows += kv_transfer(pages=(64,), layout="page_first_direct", kinds=("mha",))
    return {
        "device": properties.name, "multiprocessors": properties.multi_processor_count, "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "launcher": status(), "peers": peers.available(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "copy_gbs": copy_gbs(), "quick": quick,
        "rows": rows,
    }  # fmt: skip


def show(rows: Iterable[Row]) -> str:
    """The rows as text, ratios to the first peer included."""
    lines = []
    for r in rows:
        what = " ".join(
            str(v) for k, v in r.items() if not isinstance(v, dict) and k != "bytes" and v is not None
        )
        for unit in ("device_us", "host_us", "gbs"):
            values = r.get(unit)
            if values and not (unit == "gbs" and "device_us" in r):
                lines.append(f"{what:<60} {unit:<10}" + "  ".join(f"{n} {v:.2f}" for n, v in values.items()))
    return "\n".join(lines)


def plot(data: dict[str, Any], path: str) -> None:
    """GB/s by tokens against the copy ceiling of the same run, as SVG: a panel an op.

    Raises:
        HalError: the run has no table with GB/s by tokens.
    """
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    copy = data.get("copy_gbs", 0.0)
    for r in data["rows"]:
        at = r.get("tokens", r.get("rows"))
        gbs = r.get("device_gbs") or (r["gbs"] if r.get("model") == "llama3-8b" else None)
        for name, value in (gbs or {}).items():
            if name == "copy":
                copy = value
            else:
                line = ", ".join(x for x in (name, r.get("cache"), r.get("slots")) if x)
                panels.setdefault(r["op"], {}).setdefault(line, []).append((at, value))
    if not panels:
        raise HalError(
            "hal: bench: --plot needs a table with GB/s by tokens, such as rope_kv_write or kv_write"
        )
    width, height = 640, 360
    where = data.get("device") or data["machine"]["device"]
    quick = " (quick: no numbers to quote)" if data.get("quick") else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(panels)}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height * len(panels)}" fill="white"/>',
    ]
    for i, (op, series) in enumerate(panels.items()):
        parts.append(
            f'<g transform="translate(0 {i * height})"><text x="60" y="18">{op}, {where}: GB/s by tokens{quick}</text>'
        )
        parts += [*_panel(series, copy, width, height), "</g>"]
    with open(path, "w") as file:
        file.write("\n".join([*parts, "</svg>\n"]))


def _panel(series: Mapping[str, list[tuple[int, float]]], copy: float, width: int, height: int) -> list[str]:
    top = 1.1 * max([copy, *(gbs for points in series.values() for _, gbs in points)])

    def at(tokens: int, gbs: float) -> str:
        return (
            f"{60 + math.log2(tokens) / 13 * (width - 90):.0f},{height - 40 - gbs / top * (height - 70):.0f}"
        )

    colours = ("#0a6", "#36c", "#c63", "#888", "#a3a", "#ca0", "#0bd", "#933")
    parts = []
    if copy:
        ceiling = at(1, copy), at(8192, copy)
        parts = [
            f'<polyline points="{ceiling[0]} {ceiling[1]}" stroke="black" stroke-dasharray="4"/>',
            f'<text x="64" y="{float(ceiling[0].split(",")[1]) - 4:.0f}">device copy {copy:.0f} GB/s</text>',
        ]
    for i, (name, points) in enumerate(series.items()):
        line, colour = " ".join(at(*p) for p in sorted(points)), colours[i % len(colours)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="70" y="{60 + 14 * i}" fill="{colour}">{name}</text>')
    return [
        *parts,
        *(f'<text x="{at(t, 0).split(",")[0]}" y="{height - 22}">{t}</text>' for t in (1, 32, 512, 8192)),
    ]


def main() -> None:
    """``python -m hal.bench.cuda [--json FILE] [--plot FILE]``."""
    import argparse
    import json

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    data = tables(given.quick)
    print(show(data["rows"]))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(data, file, indent=1)
    if given.plot:
        plot(data, given.plot)


if __name__ == "__main__":
    main()
