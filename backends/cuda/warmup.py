# mypy: disable-error-code="no-untyped-call, misc, call-arg, arg-type, attr-defined, no-any-return, unused-ignore"
# torch.cuda has untyped streams and events, and calls are passed on as *args.
"""Whether this machine can run these kernels, and getting ready: compiling, staging, the cost table."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

CORE = ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer")
_TABLE = {"bs": 1, "requests": 1, "width": 8192}
_CACHE = {"kv_heads": 8, "head_dim": 128, "slots": 16}
_MLA = {"n": 1, "lora_dim": 512, "rope_dim": 64, "slots": 16}
FORMS: dict[str, dict[str, Any]] = {
    "write_req_to_token": _TABLE,
    "compute_positions": {"bs": 1},
    "build_kv_indices": _TABLE,
    "build_kv_indices_from_blocks": {"bs": 1, "blocks": 1},
    "build_page_table": {**_TABLE, "pages": 1},
    "alloc_extend": {"bs": 1, "page_size": 16},
    "alloc_decode": {"bs": 1, "page_size": 16},
    "kv_write": {"n": 1, **_CACHE},
    "mla_kv_write": _MLA,
    "mla_rope_kv_write": {**_MLA, "q_heads": 16, "max_positions": 1, "interleaved": True},
    "qk_norm_rope_kv_write": {"n": 1, **_CACHE, "q_heads": 32, "max_positions": 1},
    "kv_move": {"n": 1, "num_layers": 1, "heads": 8, "head_dim": 128, "slots": 2, "page": 1, "order": "random"},
    "decode_attention": {**_CACHE, "q_heads": 32, "bs": 1, "longest": 1},
    "extend_attention": {**_CACHE, "q_heads": 32, "bs": 1},
}
"""Op -> what its contract makes an example of where none is given: Llama-3-8B's heads, DeepSeek's latent rows."""
OPS = (*CORE, *FORMS)


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


def warmup(
    ops: Sequence[str],
    device: Any = None,
    progress: Callable[[float, str], None] = lambda done, what: None,
    **options: Any,
) -> None:
    """Compile what serving will start, and allocate what it will need.

    Args:
        ops: names; others are ignored.
        device: a CUDA device; None is the current one.
        progress: called with how much is done, 0 to 1, and the op that begins now.
        options: ``like={op: args}``: example arguments of ops, whose forms are compiled without changing the
            tensors (a dict of arguments by name, or a tuple of positional ones). The core ops without an example are
            compiled for int64 indices, rope_kv_write for Llama-3-8B's heads in bf16; the others for `FORMS`.
    """
    from hal import ops as contracts
    from hal.triton.launch import lane

    if lane() != "device":
        return
    where = torch.device("cuda" if device is None else device)
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    like = options.get("like", {})
    with torch.cuda.device(where):
        for i, op in enumerate(ops):
            if op in OPS:
                progress(i / len(ops), op)
                given = like.get(op)
                bind = contracts.get_spec(op).bind
                args = None if given is None else bind(**given) if isinstance(given, dict) else bind(*given)
                module = importlib.import_module(f"hal.backends.cuda.{op}")
                if op in CORE:
                    module.warm(where, args)
                    continue
                launcher = getattr(module, op)
                for call in calls(op, args or example(op, where)):
                    launcher(**call)
        torch.cuda.synchronize()


def example(op: str, where: torch.device) -> dict[str, Any]:
    """Arguments of an op beyond the core, of the form in `FORMS`."""
    from hal import ops as contracts
    from hal.ops.proofs.inputs import on_device

    return on_device(contracts.get_spec(op).make(**FORMS[op]), where)


def calls(op: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    """Calls that start every kernel which calls of the form of `args` may start, and change none of its tensors:
    no token has a slot or a position, no request a length; what is written all the same is written elsewhere."""
    given = {name for name, value in args.items() if value is not None}

    def all_of(value: int, count: int, *names: str) -> dict[str, torch.Tensor]:
        return {n: torch.full((count,), value, dtype=args[n].dtype, device=args[n].device) for n in names if n in given}

    def first(*names: str) -> dict[str, torch.Tensor]:
        return {n: args[n][:1] for n in names if n in given}

    def elsewhere(*names: str) -> dict[str, torch.Tensor]:
        """One row of its own, with the strides of the given one."""
        return {n: args[n].new_empty_strided((1, *args[n].shape[1:]), args[n].stride()) for n in names if n in given}

    new: dict[str, Any] = {}
    if op.endswith("kv_write"):
        new |= first("q", "k", "v", "q_rope", "k_rope", "kv_lora") | all_of(-1, 1, "positions", "slots")
    elif op == "kv_move":
        if not args["src_slots"].shape[0]:
            return []  # its workspace may have no room for even one row
        new |= all_of(-1, 1, "src_slots", "dst_slots")
    elif op.endswith("attention"):
        new |= first("q") | all_of(0, 2, "qo_indptr", "kv_indptr") | elsewhere("out", "lse")
    elif op == "build_page_table":
        new |= all_of(0, 1, "req_pool_indices", "kv_lens") | elsewhere("out")
    else:
        # What is for many requests is made ready along with what is for few.
        lens = "start_offsets", "end_offsets", "prefix_lens", "seq_lens", "kv_lens", "last_loc", "kv_start"
        new |= all_of(0, 1, "req_pool_indices", *lens, "out", "src")
        new |= all_of(0, 2, "indptr", "kv_indptr", "given_indptr")
        new |= {"block_table": args["block_table"].new_zeros(1, 1)} if "block_table" in given else {}
    return [{**args, **new}]


def status() -> dict[str, str]:
    """How kernels are started, how host copies are batched, and the device memory that staging holds."""
    from hal.backends.cuda import _engine, _staging
    from hal.triton import launch

    told = {"launch": launch.status()}
    if torch.cuda.is_available():
        told["batched copies"] = "yes" if _engine.can_batch() else "no: one call a run"
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
    from hal.bench.timing import wall_gbs
    from hal.kv.pool import KVPool

    index = torch.cuda.current_device()
    costs: dict[str, list[list[float]]] = {"d2h": [], "h2d": []}
    gpu = [torch.randn(32, 4096, 8, 128, dtype=torch.float32, device="cuda").to(torch.bfloat16) for _ in range(2)]
    pool = KVPool(*gpu, layout="layer_first")
    host = KVPool.host_like(pool, 8192, "page_first")
    token = 32 * 8 * 128 * 2
    for n in (16, 64, 256, 1024, 4096):
        for run in (1, 4, 16, 64, 256, 1024, 4096):
            if run > n:
                continue
            there = torch.randperm(4096, dtype=torch.int64, device="cpu")[:n]
            # Runs with a gap of one between them.
            order = torch.arange(n, dtype=torch.int64, device="cpu")
            here = (order // run) * (run + (run < n)) + order % run
            for way, (a, b, s, d) in {"d2h": (pool, host, there, here), "h2d": (host, pool, here, there)}.items():
                calls = {
                    m: (lambda m=m, a=a, b=b, s=s, d=d: kv_transfer(a, b, s, d, method=m)) for m in ("kernel", "direct")
                }
                gbs = wall_gbs(calls, 2 * n * token, rounds=5 if n > 256 else 15)
                costs[way].append([float(run * token), float(2 * n * token), gbs["kernel"], gbs["direct"]])
    path = tables.save("kv_transfer", index, costs)
    _staging.costs.cache_clear()
    _staging.faster.cache_clear()
    return [
        {
            "op": "kv_transfer",
            "direction": way,
            "run_bytes": r[0],
            "bytes": r[1],
            "kernel_gbs": round(r[2], 1),
            "direct_gbs": round(r[3], 1),
            "file": str(path),
        }
        for way, rows in costs.items()
        for r in rows
    ]
