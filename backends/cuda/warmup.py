# mypy: disable-error-code="no-untyped-call, misc, call-arg, arg-type, attr-defined, no-any-return, unused-ignore"
# torch.cuda has untyped streams and events, and calls are passed on as *args.
"""Whether this machine can run these kernels, and getting ready: compiling, staging, the cost table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

OPS = ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer")


def device() -> str | None:
    """Why the kernels can't run on a GPU here, or None."""
    if not torch.cuda.is_available():
        return f"no CUDA device (torch {torch.__version__})"
    if torch.version.hip is not None:
        return "this torch is built for ROCm"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        return f"compute capability {major}.{minor}: the kernels need 8.0"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 makes kernels run in Triton's interpreter"
    return None


def interpreter() -> str | None:
    """Why the kernels can't run in Triton's interpreter here, or None."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton's interpreter needs TRITON_INTERPRET=1 in the environment before triton is imported"
    import numpy

    if tuple(int(p) for p in numpy.__version__.split(".")[:2]) >= (2, 4):
        return f"Triton 3.6's interpreter fails under numpy {numpy.__version__}: it needs numpy<2.4"
    return None


def warmup(ops: Sequence[str], device: Any = None, **options: Any) -> None:
    """Compile what serving will start, and allocate what it will need.

    Args:
        ops: names; others are ignored.
        device: a CUDA device; None is the current one.
        options: ``like={op: args}``: example arguments of ops, whose forms are compiled without changing the
            tensors (a dict of arguments by name, or a tuple of positional ones). Ops without an example are
            compiled for int64 indices; rope_kv_write for Llama-3-8B's heads in bf16.
    """
    from hal import ops as contracts
    from hal.launch import lane

    if lane() != "device":
        return
    where = torch.device("cuda" if device is None else device)
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    like = options.get("like", {})
    with torch.cuda.device(where):
        for op in ops:
            if op in OPS:
                given = like.get(op)
                bind = contracts.spec(op).bind
                args = None if given is None else bind(**given) if isinstance(given, dict) else bind(*given)
                globals()[f"_{op}"](where, args)
        torch.cuda.synchronize()


def _get_last_loc(where: torch.device, args: dict[str, Any] | None) -> None:
    from hal.backends.cuda.get_last_loc import get_last_loc

    zero = torch.zeros(1, dtype=torch.int64, device=where)
    get_last_loc(
        **(args or {"req_to_token": zero.int()[None], "req_pool_indices": zero, "prefix_lens": zero})
    )


def _assign_extend_cache_locs(where: torch.device, args: dict[str, Any] | None) -> None:
    """Both kernels: for few requests, and for many."""
    from hal.backends.cuda.assign_extend_cache_locs import FEW, assign_extend_cache_locs

    zero = torch.zeros(1, dtype=torch.int64, device=where)
    given = args or {
        "req_to_token": zero.int()[None], "req_pool_indices": zero, "start_offsets": zero,
        "end_offsets": zero, "out": zero,
    }  # fmt: skip
    for bs in (1, FEW + 1):
        index = [
            torch.zeros(bs, dtype=given[n].dtype, device=where)
            for n in ("req_pool_indices", "start_offsets", "end_offsets")
        ]
        assign_extend_cache_locs(
            given["req_to_token"], *index, torch.zeros(1, dtype=given["out"].dtype, device=where)
        )


def _rope_kv_write(where: torch.device, args: dict[str, Any] | None) -> None:
    """Positions of -1: nothing is rotated, nothing is written."""
    from hal.backends.cuda.rope_kv_write import rope_kv_write

    if args is None:
        q = torch.zeros(1, 32, 128, dtype=torch.bfloat16, device=where)
        k, cache = q[:, :8].contiguous(), torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=where)
        at = torch.zeros(1, dtype=torch.int64, device=where)
        args = {
            "q": q, "k": k, "v": k.clone(), "cos_sin_cache": torch.zeros(1, 128, device=where), "positions": at,
            "k_cache": cache, "v_cache": cache.clone(), "slots": at,
        }  # fmt: skip
    rope_kv_write(**{**args, "positions": torch.full_like(args["positions"], -1)})


def _kv_transfer(where: torch.device, args: dict[str, Any] | None) -> None:
    """Slots of -1: nothing is moved. Makes the staging of the current stream too."""
    from hal.backends.cuda import _staging
    from hal.backends.cuda.kv_transfer import kv_transfer

    _staging.buffers(where)
    if args is None:
        return
    none = torch.full((1,), -1, dtype=args["src_slots"].dtype)
    for a, b in ((args["src"], args["dst"]), (args["dst"], args["src"])):
        if all(p.pinned or p.device.type == "cuda" for p in (a, b)):
            kv_transfer(a, b, none.to(where), none.to(where), method="kernel")


def status() -> dict[str, str]:
    """How kernels are started, how host copies are batched, and the device memory that staging holds."""
    from hal import launch
    from hal.backends.cuda import _engine, _staging

    told = {"launch": launch.status()}
    if torch.cuda.is_available():
        told["batched copies"] = "yes" if _engine.batched() else "no: one call a run"
        told["staging"] = f"{_staging.staged_bytes()} bytes of device memory"
    return told


def tune() -> list[dict[str, Any]]:
    """Measure kv_transfer's two methods on this machine and keep the cost table that ``auto`` reads.

    Returns:
        Rows: direction, bytes of a run, bytes in all, GB/s of each method, and the file written.
    """
    from hal import tune as tables
    from hal.backends.cuda import _staging
    from hal.backends.cuda.kv_transfer import kv_transfer
    from hal.bench.cuda import wall_gbs
    from hal.kvpool import KVPool

    index = torch.cuda.current_device()
    costs: dict[str, list[list[float]]] = {"d2h": [], "h2d": []}
    gpu = [torch.randn(32, 4096, 8, 128, device="cuda").to(torch.bfloat16) for _ in range(2)]
    pool = KVPool(*gpu, layout="layer_first")
    host = KVPool.host_like(pool, 8192, "page_first")
    token = 32 * 8 * 128 * 2
    for n in (16, 64, 256, 1024, 4096):
        for run in (1, 4, 16, 64, 256, 1024, 4096):
            if run > n:
                continue
            there = torch.randperm(4096)[:n]
            # Runs with a gap of one between them.
            here = (torch.arange(n) // run) * (run + (run < n)) + torch.arange(n) % run
            for way, (a, b, s, d) in {
                "d2h": (pool, host, there, here),
                "h2d": (host, pool, here, there),
            }.items():
                calls = {
                    m: (lambda m=m, a=a, b=b, s=s, d=d: kv_transfer(a, b, s, d, method=m))
                    for m in ("kernel", "direct")
                }
                gbs = wall_gbs(calls, 2 * n * token, rounds=5 if n > 256 else 15)
                costs[way].append([float(run * token), float(2 * n * token), gbs["kernel"], gbs["direct"]])
    path = tables.save("kv_transfer", index, costs)
    _staging.costs.cache_clear()
    return [
        {"op": "kv_transfer", "direction": way, "run_bytes": r[0], "bytes": r[1], "kernel_gbs": round(r[2], 1),
         "direct_gbs": round(r[3], 1), "file": str(path)}
        for way, rows in costs.items() for r in rows
    ]  # fmt: skip
