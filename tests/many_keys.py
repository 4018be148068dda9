"""Attention over so many keys that what each tile of them loses adds up, and the log-sum-exps that are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEYS = 1 << 17
LIMIT = 1e-5
"""Ten units in the last place of the sums, which are near 12."""


def made(
    op: str, n: int, heads: tuple[int, int, int, int], dtype: torch.dtype, cache: torch.dtype, device: str
) -> dict[str, Any]:
    """Arguments of n queries that all see the same keys: where decode has many requests, a program has many tiles of
    one. `heads`: of queries, of keys and values, head_dim, v_head_dim; MLA's rows are shared."""
    q_heads, kv_heads, dim, v_dim = heads
    g = torch.Generator(device).manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    k = normal(KEYS, kv_heads, dim).to(cache)
    v = k[..., :v_dim] if dim == 576 else normal(KEYS, kv_heads, v_dim).to(cache)
    slots = torch.randperm(KEYS, generator=g, device=device).int()
    requests = n if op == "decode_attention" else 1
    args = {
        "q": normal(n, q_heads, dim).to(dtype), "k_cache": k, "v_cache": v,
        "kv_indptr": torch.arange(requests + 1, device=device) * KEYS, "kv_indices": slots.repeat(requests),
        "lse": torch.zeros(n, q_heads, device=device), "scale": dim**-0.5,
    }  # fmt: skip
    if op == "decode_attention":
        return args
    return {**args, "qo_indptr": torch.tensor([0, n], device=device), "causal": False}


def worst(args: dict[str, Any]) -> float:
    """The largest error of the log-sum-exps of the first, a middle and the last query."""
    n = args["q"].shape[0]
    which = [0, n // 2, n - 1]
    k = args["k_cache"].double()
    q = args["q"][which].double().unflatten(1, (k.shape[1], -1))
    truth = (torch.einsum("nhgd,jhd->nhgj", q, k) * args["scale"]).logsumexp(-1).flatten(1)
    return (args["lse"][which].double() - truth).abs().max().item()
