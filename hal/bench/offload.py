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
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

import hal
from hal.bench import engine_report, vllm
from hal.bench.report import machine, version
from hal.engines.vllm.offload import HalOffloadingWorker

TOKEN = 2 * 8 * 128 * 2
"""Bytes of a token and layer: k and v of Llama-3.1-8B in bf16."""
ROUNDS = 7


def _caches(layers: int, blocks: int, block_size: int, together: bool) -> CanonicalKVCaches:
    size = block_size * TOKEN
    if together:
        layers, size = 1, layers * size
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


def measure(layers: int, block_size: int, count: int, together: bool = False) -> dict[str, Any]:
    """GB/s of storing and loading `count` blocks, medians.

    Args:
        together: all layers of a block are one piece of memory, as by the older of vLLM 0.26's model runners.

    Raises:
        HalError: bytes came back otherwise than they went.
    """
    caches = _caches(layers, 2 * count, block_size, together)
    workers = {"stock": CPUOffloadingWorker(caches, 1, count), "hal": HalOffloadingWorker(caches, 1, count)}
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
    row: dict[str, Any] = {
        "layers": layers,
        "block_size": block_size,
        "blocks": count,
        "bytes": size,
        "layers together": together,
    }
    for (name, way), rates in found.items():
        row[f"{way} {name} GB/s"] = statistics.median(rates) / 1e9
    for way in ("store", "load"):
        row[f"{way} hal / stock"] = row[f"{way} hal GB/s"] / row[f"{way} stock GB/s"]
        row[f"{way} hal / memcpy"] = row[f"{way} hal GB/s"] / row[f"{way} memcpy GB/s"]
    for worker in workers.values():
        worker.shutdown()
    return row


def _watched() -> dict[str, list[Any]]:
    """From now on, the results of all stores and loads of both workers in this process, in vLLM's own terms."""
    ways: dict[int, str] = {}
    found: dict[str, list[Any]] = {"store": [], "load": []}

    def named(inner: Any, way: str) -> Any:
        return lambda self, job, *specs: (ways.update({job: way}), inner(self, job, *specs))[1]

    def finished(inner: Any) -> Any:
        def call(self: Any) -> Any:
            results = inner(self)
            for r in results:
                found[ways.pop(r.job_id)].append(r)
            return results

        return call

    for worker in (CPUOffloadingWorker, HalOffloadingWorker):
        for way in found:
            setattr(worker, f"submit_{way}", named(getattr(worker, f"submit_{way}"), way))
        setattr(worker, "get_finished", finished(worker.get_finished))  # noqa: B010
    return found


def child(spec: str, tokens: str, shape: str, file: str) -> None:
    """One engine: a prompt computed, its blocks gone from the device, and the same prompt again."""
    n = int(tokens)
    config = {"spec_name": spec, "cpu_bytes_to_use": 8 * 2**30}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}
    settings = {
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "kv_transfer_config": connector,
        "kv_cache_memory_bytes": 8 * 2**30,
    }
    llm = vllm._engine(vllm.Options(shape=shape, decode=(), ttft=(n,), throughput=0, memory=0.3, vllm=settings))
    vllm.check_engine("hal" if spec.startswith("Hal") else "stock", llm.apply_model(vllm._classes)[0])
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    rows, moved = [], _watched()
    for i in range(4):
        prompt = {"prompt_token_ids": engine_report.prompt(vocabulary, n, i)}
        row: dict[str, Any] = {}
        for what in ("computed", "returned"):
            seconds, made = _generate(llm, prompt)
            row |= {f"{what} ms": seconds * 1e3, f"{what} cached": made.num_cached_tokens or 0}
            row[f"{what} token"] = list(made.outputs[0].token_ids)
            for _ in range(2):  # a step that begins to store, and one in which it is reported
                _generate(llm, {"prompt_token_ids": [1, 2, 3]})
                time.sleep(0.3)
            if not llm.reset_prefix_cache():
                raise hal.HalError("hal: bench offload: vLLM keeps its prefix cache: nothing would come back")
        for way, results in moved.items():
            seconds = sum(r.transfer_time for r in results)
            row |= {f"{way} GB": sum(r.transfer_size for r in results) / 1e9, f"{way} s": seconds}
            results.clear()
        rows.append(row)
    size = llm.llm_engine.vllm_config.cache_config.block_size
    Path(file).write_text(json.dumps({"spec": spec, "block_size": size, "rows": rows[1:]}))


def _generate(llm: Any, prompt: dict[str, list[int]]) -> tuple[float, Any]:
    """Seconds to the first token, and what was made."""
    begin = time.perf_counter()
    (made,) = llm.generate([prompt], vllm._greedy(1), use_tqdm=False)
    return time.perf_counter() - begin, made


def returned(tokens: int, shape: str = "llama-3.1-8b") -> dict[str, Any]:
    """A prompt whose blocks come back from the host, on stock vLLM and on hal, a process each, beside computing it.

    `cached` of its tokens came back at the least, which is `hit rate` of them; GB/s of those copies, and of the stores
    before, as vLLM's workers report them.
    """
    row: dict[str, Any] = {"shape": shape, "tokens": tokens}
    for name, spec in (("stock", "CPUOffloadingSpec"), ("hal", "HalOffloadingSpec")):
        # vLLM's logs are no part of a report.
        code, text = vllm.call_child(__name__, spec, str(tokens), shape, hal=name == "hal", stdout=2)
        if code:
            raise hal.HalError(f"hal: bench offload: {name}: exit status {code}: see stderr")
        rows = json.loads(text)["rows"]
        for what in ("computed", "returned"):
            row[f"{name} {what} ms"] = statistics.median(r[f"{what} ms"] for r in rows)
        for way in ("store", "load"):
            row[f"{name} {way} GB/s"] = statistics.median(r[f"{way} GB"] / r[f"{way} s"] for r in rows if r[f"{way} s"])
        row[f"{name} cached"] = min(r["returned cached"] for r in rows)
        row[f"{name} hit rate"] = row[f"{name} cached"] / tokens
        row[f"{name} equal"] = all(r["computed token"] == r["returned token"] for r in rows)
    for way in ("store", "load"):
        row[f"{way} hal / stock"] = row[f"hal {way} GB/s"] / row[f"stock {way} GB/s"]
    row["stock / hal, returned"] = row["stock returned ms"] / row["hal returned ms"]
    return row


def main(layers: int, tokens: int, engine_tokens: int, as_json: bool) -> int:
    if not torch.cuda.is_available():
        raise hal.HalError("hal: bench offload: expected a CUDA device; there is none. tests/scale runs it on a CPU.")
    rows = [
        measure(layers, block_size, count, together)
        for block_size, count in ((16, tokens // 16), (64, tokens // 64), (16, 64))
        for together in (False, True)
    ]
    engine = returned(engine_tokens) if engine_tokens else {}
    if as_json:
        print(json.dumps({"machine": machine("cuda"), "vllm": version("vllm"), "rows": rows, "engine": engine}))
        return 0
    for name, value in engine.items():
        print(f"{name}: {value}")
    shown = ("stock GB/s", "hal GB/s", "memcpy GB/s", "hal / stock", "hal / memcpy")
    print(f"{'block':>6}{'MB':>7}  {'layers':<10}{'':6}" + "".join(f"{name:>14}" for name in shown))
    for r in rows:
        for way in ("store", "load"):
            figures = "".join(f"{r[f'{way} {name}']:>14.3f}" for name in shown)
            layout = "together" if r["layers together"] else "apart"
            print(f"{r['block_size']:>6}{r['bytes'] / 1e6:>7.0f}  {layout:<10}{way:6}{figures}")
    return 0
