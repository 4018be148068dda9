"""What the proofs of the two attention ops share: the truth, the inputs, the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.kv.view import count_slots
from hal.ops._torch import in_range
from hal.ops.proofs.fresh import PAGES, REQUESTS, SLOTS, Fresh, Wide
from hal.ops.proofs.inputs import DTYPES, FLOAT_DTYPES, INDEX_DTYPES, floats, odd_indices, paired, randint, spaced
from hal.ops.proofs.judge import Candidate, Want, attention_slack
from hal.ops.spec import FP8, Sample

# --- the truth --------------------------------------------------------------------------------------


class Truth:
    """The float64 truth of one call, a request at a time."""

    def __init__(self, a: Mapping[str, Any]) -> None:
        self.a = a
        slots = a["kv_indices"].to(torch.int64)
        self.valid = in_range(slots, count_slots(a["k_cache"]))
        scales = [1.0 if a[s] is None else float(_host.tensor(float(a[s]))) for s in ("k_scale", "v_scale")]
        self.k, self.v = (self._rows(a[c], slots) * s for c, s in zip(("k_cache", "v_cache"), scales, strict=True))
        heads = a["q"].shape[1]
        none = _host.zeros(heads, dtype=torch.float64)
        zero = _host.zeros(heads, self.v.shape[-1], dtype=torch.float64)
        # What a query that sees nothing gets.
        self.nothing = zero, zero, none - torch.inf, none

    def _rows(self, cache: Tensor, slots: Tensor) -> Tensor:
        out = _host.zeros(slots.shape[0], *cache.shape[-2:], dtype=torch.float64)
        there = slots[self.valid]
        raw = cache.view(torch.uint8) if cache.dtype in FP8 else cache
        rows = raw[there // cache.shape[1], there % cache.shape[1]] if cache.ndim == 4 else raw[there]
        out[self.valid] = rows.view(cache.dtype).double()
        return out

    def row(self, t: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, its slack, lse, its slack) of query t that sees entries [first, last)."""
        a = self.a
        entries = slice(first, max(first, last))
        valid = self.valid[entries]
        if last <= first or not bool(valid.any()):
            return self.nothing
        q = a["q"][t].double()
        k, v = self.k[entries][valid], self.v[entries][valid]
        by_group = q.view(k.shape[1], -1, q.shape[1])
        logits = torch.einsum("hgd,jhd->jhg", by_group, k).flatten(1) * a["scale"]
        size = torch.einsum("hgd,jhd->jhg", by_group.abs(), k.abs()).flatten(1) * abs(a["scale"])
        if a["logit_cap"]:
            logits = a["logit_cap"] * torch.tanh(logits / a["logit_cap"])
        lse = torch.logsumexp(logits, dim=0)
        p = torch.exp(logits - lse).view(len(k), *by_group.shape[:2])
        out, weight = (torch.einsum("jhg,jhd->hgd", p, x).flatten(0, 1) for x in (v, v.abs()))
        slack, relative = attention_slack(a["q"].dtype, q.shape[1], size.amax(0), _host.full((len(q),), len(k)), weight)
        return out, slack, lse, relative


def want_of(a: Mapping[str, Any], rows: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Want]:
    """What a call must give where query t sees one of the ranges ``rows[t]``; none: that row is not named."""
    truth = Truth(a)
    (n, heads), dim = a["q"].shape[:2], int(a["v_cache"].shape[-1])
    named = _host.tensor([bool(r) for r in rows], dtype=torch.bool)
    outs, lses = [], []
    for turn in range(max([1, *map(len, rows)])):
        out, out_slack = (_host.zeros(n, heads, dim, dtype=torch.float64) for _ in range(2))
        lse, lse_slack = (_host.zeros(n, heads, dtype=torch.float64) for _ in range(2))
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

ODD = {"index": "i64", "indptr": "i64"}
IN_RUNS = {"lengths": "full", "run": 64, "slots": 512}
"""Of one request: slots by pages, as kernels may fetch them together."""
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
            for h in (128, 256)
            for d in ("fp16", "fp32")
        ),
        Sample("no-requests", {"bs": 0}, control="one"),
        Sample("shared-slots", {"slots": 16, "longest": 30}),
        *(Sample(f"{i}-{p}", {"index": i, "indptr": p}) for i in ("i32", "i64") for p in ("i32", "i64")),
        Sample("paged-16", {"cache": "paged"}),
        Sample("paged-1", {"cache": "paged", "page_size": 1}),
        Sample("paged-3-fp32", {"cache": "paged", "page_size": 3, "dtype": "fp32"}),
        *(
            Sample(f"{c}-{view}", {"cache": c, "cache_view": view})
            for c in ("slots", "paged")
            for view in ("pairs", "padded")
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
        *(Sample(f"nan-in-one-request-{d}", {"nan": True, "lengths": "full", "dtype": d}) for d in DTYPES),
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
            "e4m3-paged-pairs", {"cache_dtype": "e4m3", "cache": "paged", "cache_view": "pairs"}, "feature:fp8_e4m3"
        ),
        Sample("e4m3-skip", {"cache_dtype": "e4m3", "values": "skip", "scales": "float"}, "feature:fp8_e4m3"),
        *(
            Sample(f"{c}-mla-{d}-scale-{s}", {**mla, "cache_dtype": c, "dtype": d, "scales": s}, f"feature:fp8_{c}")
            for c, d, s in (("e4m3", "bf16", "tensor"), ("e5m2", "fp16", "float"))
        ),
        Sample(
            "e4m3-mla-paged-skip",
            {**mla, "cache_dtype": "e4m3", "cache": "paged", "page_size": 4, "values": "skip", "scales": "float"},
            "feature:fp8_e4m3",
        ),
    )


RAGGED: dict[str, Any] = {
    "slots": (240, 240),
    "q_heads": [4, 8],
    "kv_heads": [1, 2, 4],
    "head_dim": [64, 128],
    "dtype": DTYPES,
    "cache": ("slots", "paged"),
    "page_size": [1, 3, 16],
    "cache_view": ("plain", "pairs", "padded"),
    "q_view": ("plain", "fused", "misaligned"),
    "index": ("i32", "i64"),
    "indptr": ("i32", "i64"),
    "values": ("valid", "skip", "edge", "extreme"),
    "indptr_values": ("valid", "edge", "extreme"),
    "lengths": ("ragged", "skewed"),
    "sliding_window": (-1, 20),
    "logit_cap": [0.0, 7.0],
    "out": ("none", "given", "strided"),
    "lse": (True, False),
}


def fresh(slots: int, wide: Mapping[str, Wide], listed: Callable[[Mapping[str, Any]], int], queries: str) -> Fresh:
    """`slots`: as many as most draws need; `listed`: parameters -> tokens that are listed; `queries`: what n is in."""
    few: dict[str, Any] = {
        "q_heads": lambda p: max(2, p["kv_heads"]),
        "kv_heads": 1,
        "head_dim": 64,
        # Requests that overlap are a candidate each: a square of a truth.
        "indptr_values": "valid",
    }

    def size(p: Mapping[str, Any]) -> int:
        n = p["bs"] * p.get(queries, 1)
        return int(
            (listed(p) + 9) * (n + p["head_dim"]) * p["q_heads"]
            + 1500 * n
            + 2 * p["slots"] * p["kv_heads"] * p["head_dim"]
        )

    def held(p: Mapping[str, Any]) -> int:
        # The caches have no truth. What is listed is widened to float64, and so are results with their slack.
        rows = 8 * listed(p) + 24 * p["bs"] * p.get(queries, 1)
        caches = 2 * FLOAT_DTYPES[p["dtype"]].itemsize * p["slots"] * p["kv_heads"]
        return int(p["head_dim"] * (caches + p["q_heads"] * rows))

    return Fresh(
        {
            "bs": Wide(REQUESTS, {**few, "lengths": "sparse", "longest": (1, 2), **({"prefix": 0} if queries else {})}),
            "slots": Wide(SLOTS, {**few, "bs": (4, 8), "longest": (20, 30), "lengths": "full"}, PAGES),
            "q_heads": Wide([128]),
            "kv_heads": Wide([64, 128], {"q_heads": 128}),
            "page_size": Wide([64, 128, 256], {"cache": "paged", "slots": 2048}),
            **{name: Wide(w.sizes, {**few, **w.beside}) for name, w in wide.items()},
        },
        size,
        {"bs": (2, 5), "longest": (3, 20), "slots": slots, "q_heads": [4, 8], "lengths": "ragged"},
        held,
    )


def lengths(g: torch.Generator, bs: int, longest: int, kind: str) -> list[int]:
    """``ragged``; ``full``: all the longest; ``empty``: none has any; ``skewed``: one has all; ``sparse``: one in
    sixteen has as many as the longest."""
    if kind == "full":
        return [longest] * bs
    if kind == "empty":
        return [0] * bs
    if kind == "sparse":
        return [longest if i % 16 == 15 else 0 for i in range(bs)]
    if kind == "skewed":
        return [longest if i == bs // 2 else i % 2 for i in range(bs)]
    out: list[int] = randint(g, 0, longest + 1, (bs,)).tolist()
    return out


def indptr_of(sizes: Sequence[int], kind: str, dtype: str) -> Tensor:
    exact = _host.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int64)
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
    run: int = 1,
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
    nan: bool = False,
) -> dict[str, Any]:
    """The arguments but for qo_indptr and causal. What is in no listed slot is NaN.

    cache: ``slots``, ``paged``. cache_view: ``plain``; ``pairs`` (k and v interleaved in one tensor); ``padded`` (odd
    strides); ``shared`` (MLA: v is the first elements of k); ``far`` (slots 2^29 elements apart). run: so many slots of
    a request follow each other, from a multiple of it on, as engines with pages list them. q_view: ``plain``,
    ``fused`` (a view of a fused qkv), ``misaligned``. scales: ``none``, ``float``, ``tensor``. out: ``none``,
    ``given``, ``strided``. nan: the first value that the second request lists is NaN.
    loud: what the queries are multiplied by, for sharp and for flat distributions.
    """
    dt, kind, dv = FLOAT_DTYPES[dtype], FLOAT_DTYPES[cache_dtype or dtype], v_head_dim or head_dim
    order = _in_runs(g, slots, kv_lens, run) if run > 1 else _some(g, slots, sum(kv_lens))
    listed = odd_indices(order, slots, values, INDEX_DTYPES[index])
    lead = (slots // page_size, page_size) if cache == "paged" else (slots,)
    args: dict[str, Any] = {"q": _query(g, (n, q_heads, head_dim), dt, q_view, loud)}
    args["k_cache"], args["v_cache"] = _caches(g, (*lead, kv_heads), (head_dim, dv), kind, cache_view)
    heard = listed[in_range(listed, slots)].long()
    silent = _host.ones(lead, dtype=torch.bool)
    silent.view(-1)[heard] = False
    for c in ("k_cache", "v_cache"):
        if kind in FP8:
            args[c].view(torch.uint8)[silent] = 0x7F
        else:
            args[c][silent] = torch.nan
    if nan:
        args["v_cache"].view(-1, *args["v_cache"].shape[-2:])[listed[kv_lens[0]]] = torch.nan
    args["kv_indptr"] = indptr_of(kv_lens, indptr_values, indptr)
    args["kv_indices"] = listed
    wide = _host.randn(n, q_heads, dv + 8, generator=g).to(dt)
    args["out"] = {"none": None, "given": wide[..., :dv].contiguous(), "strided": wide[..., :dv]}[out]
    args["lse"] = _host.zeros(n, q_heads) if lse else None
    args["k_scale"], args["v_scale"] = {
        "none": (None, None),
        "float": (0.37, 2.25),
        "tensor": (_host.tensor([0.37]), _host.tensor([2.25])),
    }[scales]
    return args | {"scale": head_dim**-0.5, "sliding_window": sliding_window, "logit_cap": logit_cap}


def _some(g: torch.Generator, of: int, n: int) -> Tensor:
    """n of so many, each once where there are enough."""
    return _host.randperm(of, generator=g)[:n] if n <= of else randint(g, 0, of, (n,))


def _in_runs(g: torch.Generator, slots: int, kv_lens: Sequence[int], run: int) -> Tensor:
    """Slots of requests, each of which has runs of its own."""
    counts = [-(-n // run) for n in kv_lens]
    first = _some(g, slots // run, sum(counts))
    begins = accumulate(counts, initial=0)
    runs = (first[b : b + c, None] * run + _host.arange(run) for b, c in zip(begins, counts, strict=False))
    each = [r.view(-1)[:n] for r, n in zip(runs, kv_lens, strict=True)]
    return torch.cat([_host.arange(0), *each])


def _query(g: torch.Generator, shape: tuple[int, int, int], dtype: torch.dtype, view: str, loud: float) -> Tensor:
    n, heads, dim = shape
    x = (floats(g, shape, torch.float32) * loud).to(dtype)
    if view == "fused":
        wide = _host.zeros(n, heads + 3, dim, dtype=dtype)
        wide[:, :heads] = x
        return wide[:, :heads]
    if view == "misaligned":
        return torch.cat([_host.zeros(1, dtype=dtype), x.view(-1)])[1:].view(shape)
    return x


def _caches(
    g: torch.Generator, lead: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, view: str
) -> tuple[Tensor, Tensor]:
    if view == "shared":
        k = _host.randn(*lead, dims[0], generator=g).to(dtype)
        return k, k[..., : dims[1]]
    if view == "pairs":
        return paired(g, lead, dims, dtype)
    k, v = (_host.randn(*lead, d, generator=g).to(dtype) for d in dims)
    return spaced(k, view), spaced(v, view)
