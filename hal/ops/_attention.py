"""What the two attention ops share: the reference's arithmetic, the rules on arguments, the truth, the inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._judge import Candidate, Want, attention_slack
from hal.ops._make import FAR, FLOAT_DTYPES, INDEX_DTYPES, floats, odd_indices, randint
from hal.ops._spec import FLOATS, FP8, INDEX, SHORT, Sample, ScaleArg, TensorArg, ValueArg, describe
from hal.ops._torch import in_range
from hal.ops.get_last_loc import check_range

STATIC = frozenset({"q_heads", "kv_heads", "head_dim", "v_head_dim", "page_size"})

ELEMENTS = 1 << 22
"""Logits that the reference keeps at a time."""


# --- the arguments ----------------------------------------------------------------------------------


def q_arg(rows: str) -> TensorArg:
    return TensorArg(f"{rows} q_heads head_dim", FLOATS, stride="inner")


def cache_arg(head_dim: str) -> TensorArg:
    return TensorArg(
        f"slots kv_heads {head_dim} | pages page_size kv_heads {head_dim}", FLOATS + FP8, stride="inner"
    )


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
        "scale": ValueArg(), "sliding_window": ValueArg(off=-1), "logit_cap": ValueArg(off=0.0),
        "k_scale": ScaleArg(), "v_scale": ScaleArg(),
    }  # fmt: skip


def check(op: str, a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    """The rules that hold of dtypes and static sizes."""

    def bad(argument: str, expected: str, got: str) -> ArgumentError:
        return ArgumentError(op, argument, expected, got)

    q, k_cache, v_cache = a["q"], a["k_cache"], a["v_cache"]
    if not dims["kv_heads"] or dims["q_heads"] % dims["kv_heads"]:
        raise bad("q", f"heads in a multiple of k_cache's {dims['kv_heads']}", f"{dims['q_heads']} heads")
    if not dims["head_dim"] or not dims["v_head_dim"]:
        raise bad("q" if not dims["head_dim"] else "v_cache", "heads of at least one element", describe(q))
    for x, cache in (("k", k_cache), ("v", v_cache)):
        if cache.dtype not in (q.dtype, *FP8):
            raise bad(f"{x}_cache", f"{SHORT[q.dtype]} (q's dtype) or an fp8 dtype", describe(cache))
        scale = a[f"{x}_scale"]
        if scale is not None and cache.dtype not in FP8:
            raise bad(f"{x}_scale", f"None, since {x}_cache is not fp8", str(scale))
    if v_cache.dtype != k_cache.dtype:
        raise bad("v_cache", f"{SHORT[k_cache.dtype]}, k_cache's dtype", describe(v_cache))
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise bad("v_cache", f"k_cache's shape but for the last dim, {describe(k_cache)}", describe(v_cache))


def check_numbers(op: str, scale: Any, sliding_window: Any, logit_cap: Any) -> None:
    """The rules on plain values, which selection does not see."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ArgumentError(op, "scale", "a finite float", repr(scale))
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window < -1:
        raise ArgumentError(op, "sliding_window", "an int, -1 (no window) or more", repr(sliding_window))
    if isinstance(logit_cap, bool) or not isinstance(logit_cap, int | float) or not 0 <= logit_cap < math.inf:
        raise ArgumentError(op, "logit_cap", "a float, 0 (no cap) or more", repr(logit_cap))


def check_values(op: str, a: Mapping[str, Any], indptrs: Mapping[str, int]) -> None:
    """Values within their tensors; `indptrs` maps an argument to its upper end. Syncs."""
    for name, high in indptrs.items():
        check_range(op, name, a[name], 0, high)
        down = (a[name][1:] < a[name][:-1]).nonzero()
        if down.numel():
            raise ArgumentError(op, name, "ascending values", f"a smaller one at index {int(down[0, 0]) + 1}")
    check_range(op, "kv_indices", a["kv_indices"], -1, slots_of(a["k_cache"]) - 1)


def slots_of(cache: Tensor) -> int:
    return cache.shape[0] * (cache.shape[1] if cache.ndim == 4 else 1)


# --- the reference ----------------------------------------------------------------------------------


def gather(cache: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    """fp32 ``[nnz, kv_heads, dim]``: the rows of `slots`; zeros where not `valid`."""
    if slots_of(cache) == 0:
        return torch.zeros(slots.shape[0], *cache.shape[-2:], device=cache.device)
    index = torch.where(valid, slots.to(torch.int64), 0)
    raw = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    rows = raw[index // cache.shape[1], index % cache.shape[1]] if cache.ndim == 4 else raw[index]
    return rows.view(cache.dtype).float().masked_fill(~valid.view(-1, 1, 1), 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | Tensor,
    logit_cap: float,
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
    return out.reshape(n, heads, -1), lse.view(n, heads)


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
    valid = in_range(kv_indices, slots_of(k_cache))
    k, v = gather(k_cache, kv_indices, valid), gather(v_cache, kv_indices, valid)
    out = torch.zeros(n, heads, v.shape[-1], device=q.device)
    lse = torch.full((n, heads), -torch.inf, device=q.device)
    j = torch.arange(nnz, device=q.device)
    step = max(1, ELEMENTS // max(1, heads * nnz))
    for t in range(0, n if nnz else 0, step):
        part = slice(t, t + step)
        seen = valid & (j >= first[part, None]) & (j < last[part, None])
        factor: float | Tensor = scale if k_scale is None else k_scale * scale
        out[part], lse[part] = attend(q[part].float(), k, v, seen, factor, logit_cap)
    return (out if v_scale is None else out * v_scale), lse


def bounds(indptr: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each request begins and ends, in int64, both within [0, size], the end not before the beginning."""
    p = indptr.to(torch.int64).clamp(0, size)
    return p[:-1], torch.maximum(p[1:], p[:-1])


# --- the truth --------------------------------------------------------------------------------------


class Truth:
    """The float64 truth of one call, a request at a time."""

    def __init__(self, a: Mapping[str, Any]) -> None:
        self.a = a
        slots = a["kv_indices"].to(torch.int64)
        self.valid = in_range(slots, slots_of(a["k_cache"]))
        scales = [1.0 if a[s] is None else float(torch.tensor(float(a[s]))) for s in ("k_scale", "v_scale")]
        self.k, self.v = (
            self._rows(a[c], slots) * s for c, s in zip(("k_cache", "v_cache"), scales, strict=True)
        )

    def _rows(self, cache: Tensor, slots: Tensor) -> Tensor:
        flat = cache.reshape(-1, *cache.shape[-2:]) if cache.ndim == 4 else cache
        out = torch.zeros(slots.shape[0], *flat.shape[1:], dtype=torch.float64)
        for j, (slot, ok) in enumerate(zip(slots.tolist(), self.valid.tolist(), strict=True)):
            if ok:
                out[j] = flat[slot].double()
        return out

    def row(self, t: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, its slack, lse, its slack) of query t that sees entries [first, last)."""
        a = self.a
        q = a["q"][t].double()
        heads, dim = q.shape
        entries = [j for j in range(first, last) if self.valid[j]]
        k, v = self.k[entries], self.v[entries]
        group = heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if not entries:
            zero = torch.zeros(heads, v.shape[-1], dtype=torch.float64)
            return (
                zero,
                zero,
                torch.full((heads,), -torch.inf, dtype=torch.float64),
                torch.zeros_like(zero[:, 0]),
            )
        terms = q.unsqueeze(0) * k * a["scale"]
        logits = terms.sum(-1)
        if a["logit_cap"]:
            logits = a["logit_cap"] * torch.tanh(logits / a["logit_cap"])
        lse = torch.logsumexp(logits, dim=0)
        p = torch.exp(logits - lse).unsqueeze(-1)
        slack, relative = attention_slack(
            a["q"].dtype,
            dim,
            terms.abs().sum(-1).amax(0),
            torch.full((heads,), len(entries)),
            (p * v.abs()).sum(0),
        )
        return (p * v).sum(0), slack, lse, relative


def wanted(a: Mapping[str, Any], rows: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Want]:
    """What a call must give where query t sees one of the ranges ``rows[t]``; none: that row is not named."""
    truth = Truth(a)
    (n, heads), dim = a["q"].shape[:2], int(a["v_cache"].shape[-1])
    named = torch.tensor([bool(r) for r in rows], dtype=torch.bool)
    outs, lses = [], []
    for turn in range(max([1, *map(len, rows)])):
        out, out_slack = (torch.zeros(n, heads, dim, dtype=torch.float64) for _ in range(2))
        lse, lse_slack = (torch.zeros(n, heads, dtype=torch.float64) for _ in range(2))
        for t, ranges in enumerate(rows):
            if ranges:
                # A row that fewer requests name keeps its last candidate.
                first, last = ranges[min(turn, len(ranges) - 1)]
                out[t], out_slack[t], lse[t], lse_slack[t] = truth.row(t, first, last)
        outs.append(Candidate(out, out_slack))
        lses.append(Candidate(lse, lse_slack))
    want = Want(named.view(-1, 1, 1).expand(n, heads, dim).clone(), tuple(outs), dtype=a["q"].dtype)
    found = {"return": want}
    if a["out"] is not None:
        found["out"] = want
    if a["lse"] is not None:
        found["lse"] = Want(named.view(-1, 1).expand(n, heads).clone(), tuple(lses))
    return found


# --- samples ----------------------------------------------------------------------------------------

DTYPES = ("fp16", "bf16", "fp32")
ODD = {"index": "i64", "indptr": "i64"}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {"q_heads": 32, "kv_heads": 8, "head_dim": 128},
    "llama3-70b-tp8": {"q_heads": 8, "kv_heads": 1, "head_dim": 128},
    "smollm2": {"q_heads": 9, "kv_heads": 3, "head_dim": 64},
    "mha": {"q_heads": 3, "kv_heads": 3, "head_dim": 64},
}


def samples(bs: int, mla: Mapping[str, Any]) -> tuple[Sample, ...]:
    """The samples of shapes, dtypes, strides and values that both ops take; `bs`: requests where shapes are large."""
    return (
        *(Sample(d, {"dtype": d}) for d in DTYPES),
        *(Sample(f"{name}-{d}", {**s, "dtype": d, "bs": bs}) for name, s in _SHAPES.items() for d in ("bf16", "fp32")),
        *(
            Sample(f"head-dim-{h}-{d}", {"head_dim": h, "dtype": d, "bs": bs})
            for h in (128, 256) for d in ("fp16", "fp32")
        ),
        Sample("no-requests", {"bs": 0}, control="one"),
        Sample("shared-slots", {"slots": 16, "longest": 30}),
        *(Sample(f"{i}-{p}", {"index": i, "indptr": p}) for i in ("i32", "i64") for p in ("i32", "i64")),
        Sample("paged-16", {"cache": "paged"}),
        Sample("paged-1", {"cache": "paged", "page_size": 1}),
        Sample("paged-3-fp32", {"cache": "paged", "page_size": 3, "dtype": "fp32"}),
        *(
            Sample(f"{c}-{view}", {"cache": c, "cache_view": view})
            for c in ("slots", "paged") for view in ("pairs", "padded")
        ),
        Sample("fused-q", {"q_view": "fused"}),
        Sample("misaligned-q", {"q_view": "misaligned", "dtype": "fp16"}),
        Sample("new-out", {"out": "none"}),
        Sample("new-out-without-lse", {"out": "none", "lse": False}),
        *(Sample(f"window-{w}", {"sliding_window": w}) for w in (0, 1, 17, 10_000)),
        *(Sample(f"logit-cap-{d}", {"logit_cap": 5.0, "loud": 6.0, "dtype": d}) for d in DTYPES),
        Sample("logit-cap-quiet", {"logit_cap": 50.0, "loud": 1e-3, "dtype": "fp32"}),
        *(Sample(f"sharp-{d}", {"loud": 30.0, "dtype": d}) for d in DTYPES),
        # Logits whose exponential no fp32 holds.
        *(Sample(f"beyond-exp-{d}", {"loud": 90.0, "dtype": d}) for d in DTYPES),
        Sample("flat", {"loud": 0.0}),
        Sample("v-head-dim", {"head_dim": 128, "v_head_dim": 64}),
        Sample("skip", {"values": "skip", **ODD}),
        Sample("nothing-listed", {"values": "none"}),
        Sample("no-slots", {"slots": 0, "lengths": "full", "longest": 3}),
        *(Sample(f"mla-{d}", {**mla, "dtype": d}, "feature:mla") for d in DTYPES),
        Sample("mla-paged", {**mla, "cache": "paged", "page_size": 4}, "feature:mla"),
        Sample("mla-v-apart", {**mla, "cache_view": "plain"}, "feature:mla"),
        *(Sample(f"head-dim-{h}", {"head_dim": h, "bs": bs}, "feature:any_head_dim") for h in (72, 80, 96, 192)),
        Sample("head-dim-192-128", {"head_dim": 192, "v_head_dim": 128, "bs": bs}, "feature:any_head_dim"),
        *(
            Sample(f"{c}-{d}-scale-{s}", {"cache_dtype": c, "dtype": d, "scales": s}, f"feature:fp8_{c}")
            for c in ("e4m3", "e5m2")
            for d, s in (("bf16", "none"), ("fp16", "float"), ("fp32", "tensor"), ("bf16", "tensor"))
        ),
        Sample(
            "e4m3-paged-pairs", {"cache_dtype": "e4m3", "cache": "paged", "cache_view": "pairs"}, "feature:fp8_e4m3",
        ),
        Sample("e4m3-skip", {"cache_dtype": "e4m3", "values": "skip", "scales": "float"}, "feature:fp8_e4m3"),
    )  # fmt: skip


RAGGED: dict[str, Any] = {
    "slots": (240, 240), "q_heads": [4, 8], "kv_heads": [1, 2, 4], "head_dim": [64, 128], "dtype": DTYPES,
    "cache": ("slots", "paged"), "page_size": [1, 3, 16], "cache_view": ("plain", "pairs", "padded"),
    "q_view": ("plain", "fused", "misaligned"), "index": ("i32", "i64"), "indptr": ("i32", "i64"),
    "values": ("valid", "skip", "edge", "extreme"), "indptr_values": ("valid", "edge", "extreme"),
    "lengths": ("ragged", "skewed"), "sliding_window": (-1, 20), "logit_cap": [0.0, 7.0],
    "out": ("none", "given", "strided"), "lse": (True, False),
}  # fmt: skip


def lengths(g: torch.Generator, bs: int, longest: int, kind: str) -> list[int]:
    """``ragged``; ``full``: all the longest; ``empty``: none has any; ``skewed``: one has all."""
    if kind == "full":
        return [longest] * bs
    if kind == "empty":
        return [0] * bs
    if kind == "skewed":
        return [longest if i == bs // 2 else i % 2 for i in range(bs)]
    out: list[int] = randint(g, 0, longest + 1, (bs,)).tolist()
    return out


def indptr_of(sizes: Sequence[int], kind: str, dtype: str) -> Tensor:
    exact = torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype=torch.int64)
    return odd_indices(exact, int(exact[-1]) + 1, kind, INDEX_DTYPES[dtype])


def make_inputs(
    g: torch.Generator,
    n: int,
    kv_lens: Sequence[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: str = "bf16",
    cache: str = "slots",
    slots: int = 240,
    page_size: int = 16,
    cache_dtype: str | None = None,
    cache_view: str = "plain",
    q_view: str = "plain",
    index: str = "i32",
    indptr: str = "i32",
    values: str = "valid",
    indptr_values: str = "valid",
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    scales: str = "none",
    out: str = "given",
    lse: bool = True,
    loud: float = 1.0,
) -> dict[str, Any]:
    """The arguments but for qo_indptr and causal. What is in no listed slot is NaN.

    cache: ``slots``, ``paged``. cache_view: ``plain``; ``pairs`` (k and v interleaved in one tensor); ``padded`` (odd
    strides); ``shared`` (MLA: v is the first elements of k); ``far`` (slots 2^29 elements apart). q_view: ``plain``,
    ``fused`` (a view of a fused qkv), ``misaligned``. scales: ``none``, ``float``, ``tensor``. out: ``none``,
    ``given``, ``strided``. loud: what the queries are multiplied by, for sharp and for flat distributions.
    """
    dt, kind, dv = FLOAT_DTYPES[dtype], FLOAT_DTYPES[cache_dtype or dtype], v_head_dim or head_dim
    nnz = sum(kv_lens)
    order = torch.randperm(slots, generator=g)[:nnz] if nnz <= slots else randint(g, 0, slots, (nnz,))
    listed = odd_indices(order, slots, values, INDEX_DTYPES[index])
    lead = (slots // page_size, page_size) if cache == "paged" else (slots,)
    args: dict[str, Any] = {"q": _query(g, (n, q_heads, head_dim), dt, q_view, loud)}
    args["k_cache"], args["v_cache"] = _caches(g, (*lead, kv_heads), (head_dim, dv), kind, cache_view)
    heard = listed[in_range(listed, slots)].long()
    silent = torch.ones(lead, dtype=torch.bool)
    silent.view(-1)[heard] = False
    for c in ("k_cache", "v_cache"):
        if kind in FP8:
            args[c].view(torch.uint8)[silent] = 0x7F
        else:
            args[c][silent] = torch.nan
    args["kv_indptr"] = indptr_of(kv_lens, indptr_values, indptr)
    args["kv_indices"] = listed
    wide = torch.randn(n, q_heads, dv + 8, generator=g).to(dt)
    args["out"] = {"none": None, "given": wide[..., :dv].contiguous(), "strided": wide[..., :dv]}[out]
    args["lse"] = torch.zeros(n, q_heads) if lse else None
    args["k_scale"], args["v_scale"] = {
        "none": (None, None), "float": (0.37, 2.25), "tensor": (torch.tensor([0.37]), torch.tensor([2.25])),
    }[scales]  # fmt: skip
    return args | {"scale": head_dim**-0.5, "sliding_window": sliding_window, "logit_cap": logit_cap}


def _query(
    g: torch.Generator, shape: tuple[int, int, int], dtype: torch.dtype, view: str, loud: float
) -> Tensor:
    n, heads, dim = shape
    x = (floats(g, shape, torch.float32) * loud).to(dtype)
    if view == "fused":
        wide = torch.zeros(n, heads + 3, dim, dtype=dtype)
        wide[:, :heads] = x
        return wide[:, :heads]
    if view == "misaligned":
        return torch.cat([torch.zeros(1, dtype=dtype), x.view(-1)])[1:].view(shape)
    return x


def _caches(
    g: torch.Generator, lead: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, view: str
) -> tuple[Tensor, Tensor]:
    if view == "shared":
        k = torch.randn(*lead, dims[0], generator=g).to(dtype)
        return k, k[..., : dims[1]]
    if view == "pairs":
        both = torch.randn(lead[0], 2, *lead[1:], max(dims), generator=g).to(dtype)
        return both[:, 0, ..., : dims[0]], both[:, 1, ..., : dims[1]]
    fresh = [torch.randn(*lead, d, generator=g).to(dtype) for d in dims]
    if view == "plain":
        return fresh[0], fresh[1]
    out = []
    for t in fresh:
        strides = list(t.stride())
        if view == "far":
            strides[0] = FAR
        else:
            step = t.shape[-1] + 8
            for i in range(t.ndim - 2, -1, -1):
                strides[i] = step
                step = step * t.shape[i] + 16
        out.append(torch.empty_strided(tuple(t.shape), tuple(strides), dtype=dtype).copy_(t))
    return out[0], out[1]
