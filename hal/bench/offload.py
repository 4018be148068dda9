"""``hal bench offload``: blocks to host memory and back by the workers of vLLM's KV offloading, stock and on hal.

In vLLM's environment, on a CUDA device, in one run: both get the same blocks, the bytes that come back are compared,
then submissions are timed by the clock on the wall, interleaved, from an idle device to an idle device, beside one copy
of as many bytes.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

import hal
from hal.bench.report import machine, version
from hal.engines.vllm.offload import HalOffloadingWorker

TOKEN = 2 * 8 * 128 * 2
"""Bytes of a token and layer: k and v of Llama-3.1-8B in bf16."""
ROUNDS = 7


def _caches(layers: int, blocks: int, block_size: int) -> CanonicalKVCaches:
    size = block_size * TOKEN
    g = torch.Generator("cuda").manual_seed(0)
    tensors = [
        CanonicalKVCacheTensor(
            torch.randint(-128, 127, (blocks, size), generator=g, dtype=torch.int8, device="cuda"), size
        )
        for _ in range(layers)
    ]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, size) for i in range(layers)]])


def _seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(layers: int, block_size: int, count: int) -> dict[str, Any]:
    """GB/s of storing and loading `count` blocks, medians.

    Raises:
        HalError: bytes came back otherwise than they went.
    """
    caches = _caches(layers, 2 * count, block_size)
    workers = {
        "stock": CPUOffloadingWorker(caches, 1, count),
        "hal": HalOffloadingWorker(caches, 1, count),
    }
    pick = random.Random(0)
    source, target = pick.sample(range(2 * count), count), list(range(count))
    on_device, on_host = GPULoadStoreSpec(source, [count], [0]), CPULoadStoreSpec(target)
    before = [t.tensor[source].clone() for t in caches.tensors]
    size = count * layers * block_size * TOKEN
    pinned = torch.empty(min(size, 2**30), dtype=torch.int8, device="cpu", pin_memory=True)
    flat = torch.empty(pinned.shape, dtype=torch.int8, device="cuda")
    found: dict[tuple[str, str], list[float]] = {}
    job = 0
    for i in range(ROUNDS + 1):
        for name, worker in workers.items():
            for way in ("store", "load"):
                job += 1
                if way == "store":
                    seconds = _seconds(lambda w=worker, j=job: w.submit_store(j, on_device, on_host))  # type: ignore[misc]
                else:
                    for t in caches.tensors if i == 0 else ():
                        t.tensor[source] = 0
                    seconds = _seconds(lambda w=worker, j=job: w.submit_load(j, on_host, on_device))  # type: ignore[misc]
                worker.get_finished()
                if i:
                    found.setdefault((name, way), []).append(size / seconds)
            if i == 0 and not all(
                torch.equal(t.tensor[source], b) for t, b in zip(caches.tensors, before, strict=True)
            ):
                raise hal.HalError(f"hal: bench offload: {name}'s blocks came back otherwise than they went")
        for way, copy in (("store", lambda: pinned.copy_(flat)), ("load", lambda: flat.copy_(pinned))):
            found.setdefault(("memcpy", way), []).append(pinned.numel() / _seconds(copy))
    row: dict[str, Any] = {"layers": layers, "block_size": block_size, "blocks": count, "bytes": size}
    for (name, way), rates in found.items():
        row[f"{way} {name} GB/s"] = statistics.median(rates) / 1e9
    for way in ("store", "load"):
        row[f"{way} hal / stock"] = row[f"{way} hal GB/s"] / row[f"{way} stock GB/s"]
        row[f"{way} hal / memcpy"] = row[f"{way} hal GB/s"] / row[f"{way} memcpy GB/s"]
    for worker in workers.values():
        worker.shutdown()
    return row


def main(layers: int, tokens: int, as_json: bool) -> int:
    if not torch.cuda.is_available():
        raise hal.HalError(
            "hal: bench offload: expected a CUDA device; there is none. tests/scale runs it on a CPU."
        )
    rows = [measure(layers, block_size, tokens // block_size) for block_size in (16, 64)]
    rows.append(measure(layers, 16, 64))
    if as_json:
        print(json.dumps({"machine": machine("cuda"), "vllm": version("vllm"), "rows": rows}))
        return 0
    shown = ("stock GB/s", "hal GB/s", "memcpy GB/s", "hal / stock", "hal / memcpy")
    print(f"{'block':>6}{'MB':>7}  {'':6}" + "".join(f"{name:>14}" for name in shown))
    for r in rows:
        for way in ("store", "load"):
            figures = "".join(f"{r[f'{way} {name}']:>14.3f}" for name in shown)
            print(f"{r['block_size']:>6}{r['bytes'] / 1e6:>7.0f}  {way:6}{figures}")
    return 0
