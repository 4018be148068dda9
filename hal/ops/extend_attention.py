"""extend_attention: the new tokens of each request attend to that request's tokens in the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._errors import ArgumentError
from hal.ops import _attention
from hal.ops.proofs.fresh import TOKENS, Wide, room_for
from hal.ops.proofs.inputs import generator
from hal.ops.proofs.judge import Want
from hal.ops.spec import ErrorSample, OpSpec, Sample, ValueArg, describe


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    """Attention of the queries ``q[qo_indptr[i]:qo_indptr[i + 1]]`` of each request over its listed slots.

    Request i has the slots ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``, in the order of positions. Its queries are
    those of the last of these tokens, whose k and v are in the cache already: query t of m, of a request of l tokens,
    has position ``l - m + t`` and sees positions up to its own. Otherwise it is `decode_attention`.

    Args:
        q: ``[n, q_heads, head_dim]`` fp16, bf16 or fp32, the requests one after the other; the last dim contiguous.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, of q's dtype or fp8, any
            strides but the last dim's.
        v_cache: like k_cache, with v_head_dim. MLA: ``k_cache[..., :512]``.
        qo_indptr: ``[bs + 1]`` int32 or int64. Any value is safe: clamped to [0, n], and a request that ends before it
            begins has no queries. A row of no request stays as it was (in a new `out`: undefined); one of
            several gets the result of one of them, element by element.
        kv_indptr: ``[bs + 1]`` int32 or int64, clamped likewise to [0, nnz].
        kv_indices: ``[nnz]`` int32 or int64. -1 or out of range: no key is there, but the position counts.
        out: ``[n, q_heads, v_head_dim]`` of q's dtype, written; None: a new one.
        lse: ``[n, q_heads]`` fp32, written: the natural logarithm of ``sum_j exp(logit_j)``, -inf where none is seen.
        scale: what logits are multiplied by, e.g. ``head_dim ** -0.5``.
        causal: False: every query sees all of its request (but for the window, which is of earlier tokens).
        sliding_window: how many tokens before its own a query sees (FlashInfer's ``window_left``); -1: all.
        logit_cap: c > 0 makes a logit x ``c tanh(x / c)``, after `scale`; 0: none.
        k_scale: for an fp8 cache: what k is multiplied by; a float or a one-element float32 tensor; None is 1.
        v_scale: likewise for v.

    Returns:
        `out`. A NaN or infinity in a listed slot may reach every query of its request; one in a slot that is
        not listed reaches none.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> k_cache, v_cache = torch.zeros(8, 1, 64), torch.arange(8.0).view(8, 1, 1).expand(8, 1, 64).contiguous()
        >>> qo, kv, slots = torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([5, 6, 1])
        >>> hal.extend_attention(torch.ones(2, 4, 64), k_cache, v_cache, qo, kv, slots, scale=0.125)[:, 0, 0]
        tensor([5.5000, 4.0000])

    Source: Dao et al. (arXiv:2205.14135, arXiv:2307.08691), over slots.
    """
    n, nnz = q.shape[0], kv_indices.shape[0]
    begin, stop = _attention.bounds(qo_indptr, n)
    start, end = _attention.bounds(kv_indptr, nnz)
    t = torch.arange(n, device=q.device, dtype=torch.int64)
    mine = (t.view(-1, 1) >= begin) & (t.view(-1, 1) < stop)
    if not mine.shape[1]:
        return (
            torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype, device=q.device)
            if out is None
            else out
        )
    owned, owner = mine.any(dim=1), mine.to(torch.int8).argmax(dim=1)
    first, last = start[owner], end[owner]
    after = last - (stop[owner] - t) + 1
    if sliding_window >= 0:
        # No wider than the list, or the difference might wrap.
        first = torch.maximum(first, after - 1 - min(sliding_window, nnz))
    if causal:
        last = after
    found, sums = _attention.reference(
        q, k_cache, v_cache, kv_indices, first, last, scale, logit_cap, k_scale, v_scale
    )
    found = found.to(q.dtype)
    if lse is not None:
        lse.copy_(torch.where(owned.view(-1, 1), sums, lse))
    return found if out is None else out.copy_(torch.where(owned.view(-1, 1, 1), found, out))


# --- checks -----------------------------------------------------------------------------------------


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    _attention.check("extend_attention", a, dims)


def _check_sizes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    scale: Any,
    causal: Any,
    sliding_window: Any,
    logit_cap: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    if qo_indptr.shape[0] < 1:
        raise ArgumentError(
            "extend_attention", "qo_indptr", "[bs + 1], at least one element", describe(qo_indptr)
        )
    _attention.check_numbers("extend_attention", scale, sliding_window, logit_cap)


def _check_values(a: Mapping[str, Any]) -> None:
    _attention.check_values(
        "extend_attention", a, {"qo_indptr": a["q"].shape[0], "kv_indptr": a["kv_indices"].shape[0]}
    )


# --- the truth --------------------------------------------------------------------------------------


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    n, nnz, window = a["q"].shape[0], a["kv_indices"].shape[0], a["sliding_window"]
    qo, kv = (
        [min(max(x, 0), size) for x in a[p].tolist()] for p, size in (("qo_indptr", n), ("kv_indptr", nnz))
    )
    rows: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for i, (begin, stop) in enumerate(pairwise(qo)):
        start, end = kv[i], max(kv[i], kv[i + 1])
        for t in range(begin, stop):
            own = end - (stop - t)
            first = max(start, own - window) if window >= 0 else start
            rows[t].append((first, own + 1 if a["causal"] else end))
    return _attention.wanted(a, rows)


# --- samples ----------------------------------------------------------------------------------------


def _make(
    seed: int = 0,
    bs: int = 4,
    longest: int = 12,
    prefix: int = 25,
    lengths: str = "ragged",
    causal: bool = True,
    spare: int = 0,
    **inputs: Any,
) -> dict[str, Any]:
    """longest: new tokens of a request, up to; prefix: tokens before them, up to; spare: rows of no request.
    The rest: see `_attention.make_inputs`.
    """
    g = generator(seed)
    new = _attention.lengths(g, bs, longest, lengths)
    old = (
        _attention.lengths(g, bs, prefix, "full" if lengths == "full" else "ragged")
        if prefix >= 0
        else [0] * bs
    )
    # A negative prefix: fewer keys than queries, so that the first of them see nothing.
    kv_lens = [max(0, m + p + min(prefix, 0)) for m, p in zip(new, old, strict=True)]
    made = _attention.make_inputs(g, sum(new) + spare, kv_lens, **inputs)
    kind, dtype = inputs.get("indptr_values", "valid"), inputs.get("indptr", "i32")
    made |= {"qo_indptr": _attention.indptr_of(new, kind, dtype), "causal": causal}
    return {name: made[name] for name in SPEC.args}


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=2, longest=3, prefix=2, lengths="full", slots=32, out="none", lse=False), **change}


_MLA = {"q_heads": 4, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared", "bs": 2}
_LONG = {"bs": 2, "lengths": "full", "longest": 150, "prefix": 130, "slots": 600, "q_heads": 2, "kv_heads": 1}

SPEC = OpSpec(
    extend_attention,
    static=_attention.STATIC,
    args={
        "q": _attention.q_arg("n"),
        "k_cache": _attention.cache_arg("head_dim"),
        "v_cache": _attention.cache_arg("v_head_dim"),
        "qo_indptr": _attention.indptr_arg(),
        "kv_indptr": _attention.indptr_arg(),
        "kv_indices": _attention.indices_arg(),
        **_attention.out_args("n"),
        **{k: v for name, arg in _attention.value_args().items() for k, v in (
            [(name, arg), ("causal", ValueArg((True, False)))] if name == "scale" else [(name, arg)]
        )},
    },
    oracle=_oracle,
    returns="out",
    make=_make,
    check=_check,
    check_sizes=_check_sizes,
    check_values=_check_values,
    samples=(
        *_attention.samples(bs=2, mla=_MLA),
        Sample("one", {"bs": 1, "longest": 1, "lengths": "full"}),
        Sample("no-prefix", {"prefix": 0, "longest": 30}),
        Sample("no-tokens", {"lengths": "empty"}, control="one"),
        Sample("spare-rows", {"spare": 7}),
        Sample("fewer-keys-than-queries", {"prefix": -5, "longest": 12}),
        Sample("skewed", {"bs": 9, "lengths": "skewed", "longest": 100}),
        Sample("long", _LONG),
        Sample("long-fp32", {**_LONG, "dtype": "fp32"}),
        Sample("past-one-block", {"bs": 300, "longest": 2, "prefix": 2, "slots": 1300, "q_heads": 2, "kv_heads": 1}),
        Sample("out-strided", {"out": "strided", "spare": 3}),
        Sample("not-causal", {"causal": False}),
        Sample("not-causal-long", {**_LONG, "causal": False}),
        Sample("window-long", {**_LONG, "sliding_window": 70}),
        Sample("window-not-causal", {"sliding_window": 4, "causal": False}),
        Sample("edge", {"bs": 8, "values": "edge", "indptr_values": "edge", "longest": 5, **_attention.ODD}),
        Sample("edge-i32", {"bs": 8, "values": "edge", "indptr_values": "edge", "longest": 5}),
        Sample(
            "extreme",
            {
                "bs": 24, "values": "extreme", "indptr_values": "extreme", "longest": 3, "prefix": 6,
                "cache": "paged", **_attention.ODD,
            },
        ),
        Sample("extreme-i32", {"bs": 24, "values": "extreme", "indptr_values": "extreme", "longest": 3, "prefix": 6}),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "longest": 2, "prefix": 1, "bs": 2}, large=True),
    ),
    errors=(
        ErrorSample("q-fp64", "q", lambda: _small(q=_host.zeros(6, 4, 64, dtype=torch.float64))),
        ErrorSample(
            "q-last-dim-strided", "q", lambda: _small(q=_host.zeros(6, 4, 128, dtype=torch.bfloat16)[..., ::2]),
        ),
        ErrorSample("heads-no-multiple", "q", lambda: _small(q=_host.zeros(6, 3, 64, dtype=torch.bfloat16))),
        ErrorSample("k-cache-other-dtype", "k_cache", lambda: _small(k_cache=_host.zeros(32, 2, 64))),
        ErrorSample(
            "v-cache-other-rank", "v_cache", lambda: _small(v_cache=_host.zeros(2, 16, 2, 64, dtype=torch.bfloat16)),
        ),
        ErrorSample("v-cache-none", "v_cache", lambda: _small(v_cache=None)),
        ErrorSample(
            "indptr-empty", "qo_indptr", lambda: _small(qo_indptr=_host.zeros(0).int(), kv_indptr=_host.zeros(0).int()),
        ),
        ErrorSample("indptrs-disagree", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(4, dtype=torch.int32))),
        ErrorSample("indptr-float", "qo_indptr", lambda: _small(qo_indptr=_host.zeros(3))),
        ErrorSample("indices-rank-2", "kv_indices", lambda: _small(kv_indices=_host.zeros(2, 4, dtype=torch.int32))),
        ErrorSample("out-other-dtype", "out", lambda: _small(out=_host.zeros(6, 4, 64))),
        ErrorSample("out-fewer-rows", "out", lambda: _small(out=_host.zeros(5, 4, 64, dtype=torch.bfloat16))),
        ErrorSample("lse-other-heads", "lse", lambda: _small(lse=_host.zeros(6, 2))),
        ErrorSample("causal-text", "causal", lambda: _small(causal="yes")),
        ErrorSample("scale-text", "scale", lambda: _small(scale="1")),
        ErrorSample("window-minus-2", "sliding_window", lambda: _small(sliding_window=-2)),
        ErrorSample("cap-inf", "logit_cap", lambda: _small(logit_cap=float("inf"))),
        ErrorSample("scale-without-fp8", "k_scale", lambda: _small(k_scale=0.5)),
        ErrorSample("v-scale-without-fp8", "v_scale", lambda: _small(v_scale=_host.ones(1))),
    ),
    ragged={
        "bs": (0, 7), "longest": (0, 20), "prefix": (-3, 30), "spare": (0, 3), "causal": (True, False),
        **_attention.RAGGED,
    },
    fresh=_attention.fresh(
        480,
        {
            # Every query sees few keys, and the truth is no square.
            "longest": Wide((2_305, 2_600), {
                "bs": 1, "prefix": (0, 30), "lengths": "full", "sliding_window": 20, "causal": True,
                "slots": room_for("longest"), "spare": (0, 3),
            }),
            "prefix": Wide(TOKENS, {"bs": 1, "lengths": "full", "longest": (1, 3), "slots": room_for("prefix")}),
        },
        lambda p: p["bs"] * (p["longest"] + max(p["prefix"], 0)) // (16 if p["lengths"] == "sparse" else 1), "longest",
    ),
)  # fmt: skip
