"""The tables of ``hal bench --device cpu`` of the ops beyond the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal import _host
from hal.bench import OURS, Row, launcher, table
from hal.bench.cpu import SHAPES, by_name
from hal.bench.judge import check
from hal.bench.timing import measure
from hal.ops import get_spec

_TABLE = {"requests": 512, "width": 8192, "longest": 64}
_PAGED = {"longest": 64, "page_size": 16}
_HEADS = {**SHAPES["llama3-8b"], "slots": 8192}
_CACHED = {"kv_heads": 8, "head_dim": 128, "slots": 8192}
_MLA = {"lora_dim": 512, "rope_dim": 64, "slots": 8192}
ENGINE: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "write_req_to_token": ("bs", (1, 32, 256), _TABLE),
    "compute_positions": ("bs", (1, 32, 256), {"longest": 64}),
    "build_kv_indices": ("bs", (1, 32, 256), {**_TABLE, "longest": 1024}),
    "build_kv_indices_from_blocks": ("bs", (1, 32, 256), {"blocks": 64, "longest": 1024}),
    "build_page_table": ("bs", (1, 32, 256), {"requests": 512, "width": 8192, "pages": 64}),
    "alloc_extend": ("bs", (1, 32, 256), _PAGED),
    "alloc_decode": ("bs", (1, 32, 256), _PAGED),
    "kv_write": ("n", (1, 16, 256), _CACHED),
    "mla_kv_write": ("n", (1, 16, 256), _MLA),
    "mla_rope_kv_write": ("n", (1, 16, 256), {**_MLA, "q_heads": 16, "max_positions": 4096}),
    "qk_norm_rope_kv_write": ("n", (1, 16, 256), {**_HEADS, "kv_heads": 4, "max_positions": 4096}),
    "kv_move": ("n", (1, 16, 256), {"num_layers": 8, "heads": 8, "head_dim": 128, "slots": 1024, "page": 16}),
    "decode_attention": ("bs", (1, 8), {**_HEADS, "slots": 2048, "longest": 256, "lse": False}),
    "extend_attention": ("bs", (1, 4), {**_HEADS, "slots": 1024, "lse": False}),
}
"""Op -> the parameter of its samples that is its size, the sizes, and the rest of its shape."""


def _fused_attention(args: dict[str, Any]) -> Tensor:
    """torch's, a call a request over its gathered rows; every listed slot valid, causal, no window, no cap."""
    q, starts, keys = args["q"], args["kv_indptr"].tolist(), args["kv_indices"].long()
    news = args["qo_indptr"].tolist() if "qo_indptr" in args else range(q.shape[0] + 1)
    out = args["out"] if args.get("out") is not None else torch.empty_like(q)
    for i in range(len(starts) - 1):
        rows = keys[starts[i] : starts[i + 1]]
        new = q[news[i] : news[i + 1]].transpose(0, 1)
        k, v = (args[c].flatten(0, -3)[rows].transpose(0, 1) for c in ("k_cache", "v_cache"))
        mask = None
        if new.shape[1] > 1:
            mask = _host.ones(new.shape[1], len(rows), dtype=torch.bool).tril(len(rows) - new.shape[1])
        found = functional.scaled_dot_product_attention(new, k, v, mask, scale=args["scale"], enable_gqa=True)
        out[news[i] : news[i + 1]] = found.transpose(0, 1)
    return out


_FUSED = {"decode_attention": _fused_attention, "extend_attention": _fused_attention}


def engine(op: str, quick: bool) -> Iterator[Row]:
    """Against the reference: what the contract says in plain torch, valid indices or not, without a loop in Python.

    Attention also against torch's fused one, a call a request over its gathered rows.
    """
    size, sizes, shape = ENGINE[op]
    contract = get_spec(op)
    ours = launcher("cpu", op)
    impls: dict[str, Callable[[dict[str, Any]], Any]] = {
        OURS: partial(by_name, ours),
        "reference": partial(by_name, contract.reference),
    }
    if op in _FUSED:
        impls["eager, fused"] = _FUSED[op]
    for n in sizes[:1] if quick else sizes:
        make = partial(contract.make, **{size: n, **shape})
        for name, fn in impls.items():
            check(op, name, fn, make)
        calls = {name: partial(fn, _steady(make())) for name, fn in impls.items()}
        yield {"op": op, size: n, **measure(calls, quick)}


def _steady(args: dict[str, Any]) -> dict[str, Any]:
    """`args` that a thousand calls in place leave as large as they are.

    Norms with other weights than 1 would shrink all but the largest until they are subnormal, at which CPUs are slow.
    """
    for weight in args.keys() & {"q_weight", "k_weight"}:
        args[weight].fill_(1)
    return args


TABLES: dict[str, Callable[[bool], list[Row]]] = {op: table(partial(engine, op)) for op in ENGINE}
