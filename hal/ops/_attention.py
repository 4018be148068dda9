"""What the two attention ops share: the arguments, the rules on them, the reference's arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal._memory import finite, show
from hal.kv.view import count_slots
from hal.ops._checks import check_cache, check_range
from hal.ops._torch import in_range
from hal.ops.spec import FLOATS, FP8, INDEX, SHORT, ScaleArg, TensorArg, ValueArg, describe

STATIC = frozenset({"q_heads", "kv_heads", "head_dim", "v_head_dim", "page_size"})

ELEMENTS = 1 << 22
"""Logits that the reference keeps at a time."""


# --- the arguments ----------------------------------------------------------------------------------


def q_arg(rows: str) -> TensorArg:
    return TensorArg(f"{rows} q_heads head_dim", FLOATS, stride="inner")


def cache_arg(head_dim: str) -> TensorArg:
    return TensorArg(f"slots kv_heads {head_dim} | pages page_size kv_heads {head_dim}", FLOATS + FP8, stride="inner")


def out_args(rows: str) -> dict[str, TensorArg]:
    return {
        "out": TensorArg(f"{rows} q_heads v_head_dim", "q", stride="inner", optional=True, mutated=True),
        "lse": TensorArg(f"{rows} q_heads", (torch.float32,), optional=True, mutated=True),
    }


def indptr_arg() -> TensorArg:
    return TensorArg("bs+1", INDEX)


def indices_arg() -> TensorArg:
    return TensorArg("nnz", INDEX)


def value_args() -> dict[str, ValueArg | ScaleArg]:
    return {
        "scale": ValueArg(),
        "sliding_window": ValueArg(off=-1),
        "logit_cap": ValueArg(off=0.0),
        "k_scale": ScaleArg(),
        "v_scale": ScaleArg(),
    }


def check(op: str, a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    """The rules that hold of dtypes and static sizes."""

    def bad(argument: str, expected: str, got: str) -> ArgumentError:
        return ArgumentError(op, argument, expected, got)

    q, k_cache, v_cache = a["q"], a["k_cache"], a["v_cache"]
    if not dims["kv_heads"] or dims["q_heads"] % dims["kv_heads"]:
        raise bad("q", f"heads in a multiple of k_cache's {dims['kv_heads']}", f"{dims['q_heads']} heads")
    if not dims["head_dim"] or not dims["v_head_dim"]:
        raise bad("q" if not dims["head_dim"] else "v_cache", "heads of at least one element", describe(q))
    for x in ("k", "v"):
        check_cache(op, a, f"{x}_cache", "q", f"{x}_scale", may_be_zero=True)
    if v_cache.dtype != k_cache.dtype:
        raise bad("v_cache", f"{SHORT[k_cache.dtype]}, k_cache's dtype", describe(v_cache))
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise bad("v_cache", f"k_cache's shape but for the last dim, {describe(k_cache)}", describe(v_cache))


def check_numbers(op: str, scale: Any, sliding_window: Any, logit_cap: Any) -> None:
    """The rules on plain values, which selection does not see."""
    if not finite(scale):
        raise ArgumentError(op, "scale", "a finite float", show(scale))
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or not -1 <= sliding_window < 2**63:
        raise ArgumentError(op, "sliding_window", "an int64, -1 (no window) or more", show(sliding_window))
    if not finite(logit_cap) or logit_cap < 0:
        raise ArgumentError(op, "logit_cap", "a float, 0 (no cap) or more", show(logit_cap))


def check_values(op: str, a: Mapping[str, Any], indptrs: Mapping[str, int]) -> None:
    """Values within their tensors; `indptrs` maps an argument to its upper end. Syncs."""
    for name, high in indptrs.items():
        check_range(op, name, a[name], 0, high)
        down = (a[name][1:] < a[name][:-1]).nonzero()
        if down.numel():
            raise ArgumentError(op, name, "ascending values", f"a smaller one at index {int(down[0, 0]) + 1}")
    check_range(op, "kv_indices", a["kv_indices"], -1, count_slots(a["k_cache"]) - 1)


# --- the reference ----------------------------------------------------------------------------------


def gather(cache: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    """fp32 ``[nnz, kv_heads, dim]``: the rows of `slots`; zeros where not `valid`."""
    if count_slots(cache) == 0:
        return torch.zeros(slots.shape[0], *cache.shape[-2:], device=cache.device, dtype=torch.float32)
    index = torch.where(valid, slots.to(torch.int64), 0)
    raw = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    rows = raw[index // cache.shape[1], index % cache.shape[1]] if cache.ndim == 4 else raw[index]
    return rows.view(cache.dtype).float().masked_fill(~valid.view(-1, 1, 1), 0.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | Tensor, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``q [n, q_heads, head_dim]`` over ``k, v [nnz, kv_heads, dim]`` where ``seen [n, nnz]``."""
    n, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    grouped = q.view(n, kv_heads, heads // kv_heads, q.shape[2])
    logits = torch.einsum("nhgd,jhd->nhgj", grouped, k) * scale
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~seen.view(n, 1, 1, -1), -torch.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    p = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse))
    out = torch.einsum("nhgj,jhd->nhgd", p, v)
    return out.reshape(n, heads, v.shape[2]), lse.view(n, heads)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    logit_cap: float,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out fp32, lse) where query t sees the entries ``[first[t], last[t])`` of `kv_indices`."""
    n, heads, nnz = q.shape[0], q.shape[1], kv_indices.shape[0]
    valid = in_range(kv_indices, count_slots(k_cache))
    k, v = gather(k_cache, kv_indices, valid), gather(v_cache, kv_indices, valid)
    # A weight of 0 times a NaN is a NaN: what is not finite is left out of the products, and put in by what sees it.
    above, below = (_running(v.isnan() | (v == top)) for top in (torch.inf, -torch.inf))
    v = torch.where(v.isfinite(), v, 0.0)
    out = torch.zeros(n, heads, v.shape[-1], device=q.device, dtype=torch.float32)
    lse = torch.full((n, heads), -torch.inf, dtype=torch.float32, device=q.device)
    j = torch.arange(nnz, device=q.device, dtype=torch.int64)
    step = max(1, ELEMENTS // max(1, heads * nnz))
    for t in range(0, n if nnz else 0, step):
        part = slice(t, t + step)
        seen = valid & (j >= first[part, None]) & (j < last[part, None])
        factor: float | Tensor = scale if k_scale is None else k_scale * scale
        out[part], lse[part] = attend(q[part].float(), k, v, seen, factor, logit_cap)
    # A query that is no request's may have any of both.
    first = first.clamp(0, nnz)
    end = torch.maximum(first, last.clamp(max=nnz))
    up, down = (x[end] > x[first] for x in (above, below))
    odd = torch.where(up & down, torch.nan, torch.where(up, torch.inf, -torch.inf))
    mine = out.view(n, v.shape[1], heads // v.shape[1], v.shape[2])
    out = torch.where((up | down).unsqueeze(2) & ~mine.isnan(), odd.unsqueeze(2), mine).view(out.shape)
    return (out if v_scale is None else out * v_scale), lse


def _running(x: Tensor) -> Tensor:
    """int64 ``[n + 1, ...]``: how many of ``x[:i]`` are true."""
    counts = x.cumsum(0, dtype=torch.int64)
    return torch.cat([counts.new_zeros(1, *x.shape[1:]), counts])


def bounds(indptr: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each request begins and ends, in int64, both within [0, size], the end not before the beginning."""
    p = indptr.to(torch.int64).clamp(0, size)
    return p[:-1], torch.maximum(p[1:], p[:-1])
