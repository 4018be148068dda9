"""decode_attention: one new token of each request attends to that request's tokens in the paged KV cache."""

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
from hal.ops.spec import ErrorSample, OpSpec, Sample, describe


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    """Attention of one query a request over the slots that ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`` lists.

    ``out[i] = sum_j p_j v_j`` with ``p = softmax(scale * q[i] . k_j)``; the query is that of the last listed token,
    whose k and v are in the cache already. Each key/value head serves ``q_heads / kv_heads`` consecutive query heads
    (GQA, MQA). A request with nothing to see gives zeros, and a log-sum-exp of -inf.

    Args:
        q: ``[bs, q_heads, head_dim]`` fp16, bf16 or fp32; the last dim contiguous.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, of q's dtype or fp8, any
            strides but the last dim's.
        v_cache: like k_cache, with v_head_dim. MLA: ``k_cache[..., :512]``, which backends then read once.
        kv_indptr: ``[bs + 1]`` int32 or int64. Any value is safe: clamped to [0, nnz], and a request that ends before
            it begins is empty.
        kv_indices: ``[nnz]`` int32 or int64, slots in the order of positions. -1 or out of range: no key is there,
            but the position counts.
        out: ``[bs, q_heads, v_head_dim]`` of q's dtype, written; None: a new one.
        lse: ``[bs, q_heads]`` fp32, written: the natural logarithm of ``sum_j exp(logit_j)``. None: not asked for.
        scale: what logits are multiplied by, e.g. ``head_dim ** -0.5``.
        sliding_window: how many tokens before its own a query sees (FlashInfer's ``window_left``; one less than the
            ``sliding_window`` of a Hugging Face config); -1: all.
        logit_cap: c > 0 makes a logit x ``c tanh(x / c)``, after `scale`; 0: none.
        k_scale: for an fp8 cache: what k is multiplied by; a float or a one-element float32 tensor; None is 1.
        v_scale: likewise for v.

    Returns:
        `out`. A NaN or infinity in a listed slot may reach every query head of its request; one in a slot that
        is not listed reaches none.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> k_cache, v_cache = torch.zeros(8, 1, 64), torch.arange(8.0).view(8, 1, 1).expand(8, 1, 64).contiguous()
        >>> indptr, slots = torch.tensor([0, 2, 3]), torch.tensor([5, 6, 1])
        >>> hal.decode_attention(torch.ones(2, 4, 64), k_cache, v_cache, indptr, slots, scale=0.125)[:, 0, 0]
        tensor([5.5000, 1.0000])

    Source: Vaswani et al. (arXiv:1706.03762); one pass with a running maximum, split over the keys and merged by
    log-sum-exp: Milakov and Gimelshein (arXiv:1805.02867), Dao et al. (arXiv:2205.14135, Flash-Decoding).
    """
    start, end = _attention.bounds(kv_indptr, kv_indices.shape[0])
    if sliding_window >= 0:
        # No wider than the list, or the difference might wrap.
        start = torch.maximum(start, end - 1 - min(sliding_window, kv_indices.shape[0]))
    found, sums = _attention.reference(
        q, k_cache, v_cache, kv_indices, start, end, scale, logit_cap, k_scale, v_scale
    )
    if lse is not None:
        lse.copy_(sums)
    return found.to(q.dtype) if out is None else out.copy_(found)


# --- checks -----------------------------------------------------------------------------------------


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    _attention.check("decode_attention", a, dims)


def _check_sizes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    scale: Any,
    sliding_window: Any,
    logit_cap: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    if kv_indptr.shape[0] != q.shape[0] + 1:
        raise ArgumentError(
            "decode_attention", "kv_indptr", f"[bs + 1] = [{q.shape[0] + 1}]", describe(kv_indptr)
        )
    _attention.check_numbers("decode_attention", scale, sliding_window, logit_cap)


def _check_values(a: Mapping[str, Any]) -> None:
    _attention.check_values("decode_attention", a, {"kv_indptr": a["kv_indices"].shape[0]})


# --- the truth --------------------------------------------------------------------------------------


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    nnz, window = a["kv_indices"].shape[0], a["sliding_window"]
    p = [min(max(x, 0), nnz) for x in a["kv_indptr"].tolist()]
    return _attention.wanted(a, [[(max(i, j - 1 - window) if window >= 0 else i, j)] for i, j in pairwise(p)])


# --- samples ----------------------------------------------------------------------------------------


def _make(
    seed: int = 0, bs: int = 5, longest: int = 40, lengths: str = "ragged", **inputs: Any
) -> dict[str, Any]:
    """lengths: see `_attention.lengths`; inputs: see `_attention.make_inputs`."""
    g = generator(seed)
    made = _attention.make_inputs(g, bs, _attention.lengths(g, bs, longest, lengths), **inputs)
    return {name: made[name] for name in SPEC.args}


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=2, longest=6, slots=32, out="none", lse=False), **change}


_MLA = {"q_heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared", "bs": 3}

SPEC = OpSpec(
    decode_attention,
    static=_attention.STATIC,
    args={
        "q": _attention.q_arg("bs"),
        "k_cache": _attention.cache_arg("head_dim"),
        "v_cache": _attention.cache_arg("v_head_dim"),
        "kv_indptr": _attention.indptr_arg(),
        "kv_indices": _attention.indices_arg(),
        **_attention.out_args("bs"),
        **_attention.value_args(),
    },
    oracle=_oracle,
    returns="out",
    make=_make,
    check=_check,
    check_sizes=_check_sizes,
    check_values=_check_values,
    samples=(
        *_attention.samples(bs=3, mla=_MLA),
        Sample("one", {"bs": 1, "longest": 9, "lengths": "full"}),
        Sample("one-key-each", {"longest": 1, "lengths": "full"}),
        Sample("all-empty", {"lengths": "empty"}),
        Sample("skewed", {"bs": 9, "lengths": "skewed", "longest": 200}),
        Sample("long", {"bs": 2, "lengths": "full", "longest": 1500, "slots": 3200, "q_heads": 2, "kv_heads": 1}),
        Sample(
            "long-fp32",
            {
                "bs": 2, "lengths": "skewed", "longest": 2100, "slots": 2400, "q_heads": 2, "kv_heads": 2,
                "dtype": "fp32",
            },
        ),
        Sample("past-one-block", {"bs": 300, "longest": 5, "slots": 1600, "q_heads": 2, "kv_heads": 1}),
        Sample("out-strided", {"out": "strided"}),
        Sample(
            "window-long",
            {"sliding_window": 600, "bs": 2, "lengths": "full", "longest": 1500, "slots": 3200, "q_heads": 2},
        ),
        Sample("edge", {"bs": 8, "values": "edge", "indptr_values": "edge", **_attention.ODD}),
        Sample("edge-i32", {"bs": 8, "values": "edge", "indptr_values": "edge"}),
        Sample(
            "extreme",
            {
                "bs": 24, "values": "extreme", "indptr_values": "extreme", "longest": 9, "cache": "paged",
                **_attention.ODD,
            },
        ),
        Sample("extreme-i32", {"bs": 24, "values": "extreme", "indptr_values": "extreme", "longest": 9}),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "longest": 3, "bs": 2}, large=True),
        Sample("mla-128-heads", {**_MLA, "q_heads": 128, "bs": 2}, "feature:mla"),
    ),
    errors=(
        ErrorSample("q-fp64", "q", lambda: _small(q=_host.zeros(2, 4, 64, dtype=torch.float64))),
        ErrorSample("q-rank-2", "q", lambda: _small(q=_host.zeros(2, 256, dtype=torch.bfloat16))),
        ErrorSample(
            "q-last-dim-strided", "q", lambda: _small(q=_host.zeros(2, 4, 128, dtype=torch.bfloat16)[..., ::2]),
        ),
        ErrorSample("heads-no-multiple", "q", lambda: _small(q=_host.zeros(2, 3, 64, dtype=torch.bfloat16))),
        ErrorSample("k-cache-other-dtype", "k_cache", lambda: _small(k_cache=_host.zeros(32, 2, 64))),
        ErrorSample(
            "k-cache-other-head-dim", "k_cache", lambda: _small(k_cache=_host.zeros(32, 2, 32, dtype=torch.bfloat16)),
        ),
        ErrorSample(
            "v-cache-other-dtype", "v_cache", lambda: _small(v_cache=_host.zeros(32, 2, 64).to(torch.float8_e5m2)),
        ),
        ErrorSample("v-cache-smaller", "v_cache", lambda: _small(v_cache=_host.zeros(31, 2, 64, dtype=torch.bfloat16))),
        ErrorSample(
            "v-cache-other-heads", "v_cache", lambda: _small(v_cache=_host.zeros(32, 1, 64, dtype=torch.bfloat16)),
        ),
        ErrorSample("v-cache-none", "v_cache", lambda: _small(v_cache=None)),
        ErrorSample(
            "v-cache-other-rank", "v_cache", lambda: _small(v_cache=_host.zeros(2, 16, 2, 64, dtype=torch.bfloat16)),
        ),
        ErrorSample("indptr-too-short", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(2, dtype=torch.int32))),
        ErrorSample("indptr-float", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(3))),
        ErrorSample("indices-strided", "kv_indices", lambda: _small(kv_indices=_host.zeros(8, dtype=torch.int32)[::2])),
        ErrorSample("out-other-dtype", "out", lambda: _small(out=_host.zeros(2, 4, 64))),
        ErrorSample("out-other-shape", "out", lambda: _small(out=_host.zeros(2, 4, 32, dtype=torch.bfloat16))),
        ErrorSample(
            "out-expanded", "out", lambda: _small(out=_host.zeros(1, 4, 64, dtype=torch.bfloat16).expand(2, 4, 64)),
        ),
        ErrorSample("lse-bf16", "lse", lambda: _small(lse=_host.zeros(2, 4, dtype=torch.bfloat16))),
        ErrorSample("scale-none", "scale", lambda: _small(scale=None)),
        ErrorSample("scale-nan", "scale", lambda: _small(scale=float("nan"))),
        ErrorSample("window-minus-2", "sliding_window", lambda: _small(sliding_window=-2)),
        ErrorSample("window-float", "sliding_window", lambda: _small(sliding_window=3.0)),
        ErrorSample("cap-negative", "logit_cap", lambda: _small(logit_cap=-1.0)),
        ErrorSample("scale-without-fp8", "k_scale", lambda: _small(k_scale=0.5)),
        ErrorSample("v-scale-without-fp8", "v_scale", lambda: _small(v_scale=_host.ones(1))),
    ),
    ragged={
        "bs": (0, 9), "longest": (0, 70), **_attention.RAGGED, "lengths": ("ragged", "skewed", "empty"),
    },
    fresh=_attention.fresh(
        240, {"longest": Wide(TOKENS, {"bs": (1, 2), "lengths": "full", "slots": room_for("bs", "longest")})},
        lambda p: p["bs"] * p["longest"] // (16 if p["lengths"] == "sparse" else 1), "",
    ),
)  # fmt: skip
