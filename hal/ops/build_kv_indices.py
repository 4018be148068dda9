"""build_kv_indices: the slots of all that each request attends to, packed for paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._errors import ArgumentError
from hal.ops._spans import LONGEST, columns, extent, extents, spread
from hal.ops._torch import in_range
from hal.ops.assign_extend_cache_locs import FRESH
from hal.ops.get_last_loc import check_range
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, row_view
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import INDEX, ErrorSample, OpSpec, Sample, TensorArg, describe


def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Tensor | None = None,
) -> Tensor:
    """Packs ``req_to_token[r_i, start_i : start_i + kv_lens[i]]`` of every request into `out`, and says in
    `kv_indptr` where each begins.

    ``kv_indptr[i] = sum(kv_lens[j] for j < i)`` and ``out[kv_indptr[i] + t] = req_to_token[r_i, start_i + t]``.
    What would be read outside the table is -1. What is left of `out` stays as it was, so a buffer made for the
    largest batch costs a small one nothing; nothing is written past it. A length that is not in [0, 2^31) is 0.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64, rows of the table. Any value is safe.
        kv_lens: ``[bs]`` int32 or int64, tokens to list. Any value is safe.
        kv_indptr: ``[bs + 1]`` int32 or int64, overwritten; entries are at most capacity.
        out: ``[capacity]`` int32 or int64.
        kv_start: ``[bs]`` int32 or int64, the first column of each request (a sliding window's); None is 0.
            Any value is safe.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride.

    Example:
        >>> import torch, hal
        >>> table = torch.arange(8, dtype=torch.int32).view(2, 4)
        >>> indptr, out = torch.empty(3, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        >>> hal.build_kv_indices(table, torch.tensor([1, 0]), torch.tensor([3, 2]), indptr, out)
        tensor([4, 5, 6, 0, 1, 0], dtype=torch.int32)
        >>> indptr
        tensor([0, 3, 5], dtype=torch.int32)

    Source: the contract of SGLang's ``create_flashinfer_kv_indices_triton``, which reads the sums that this
    writes: no second kernel, and none that don't fit the lengths.
    """
    rows, width = req_to_token.shape
    bs, capacity = kv_lens.shape[0], out.shape[0]
    _, length = extents(torch.zeros_like(kv_lens), kv_lens)
    write_sums(length, kv_indptr, capacity)
    if bs == 0 or capacity == 0:
        return out
    i, t, used = spread(length, capacity)
    if rows == 0 or width == 0:
        return out.copy_(torch.where(used, -1, out))
    start = torch.zeros_like(length) if kv_start is None else kv_start.to(torch.int64)
    request, first = req_pool_indices.to(torch.int64)[i], start[i]
    # Compared before it is added, so that the sum can't wrap.
    valid = used & in_range(request, rows) & (first >= -t) & (first < width - t)
    column = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    found = req_to_token[torch.where(valid, request, 0), column].to(out.dtype)
    return out.copy_(torch.where(used, torch.where(valid, found, -1), out))


def write_sums(length: Tensor, kv_indptr: Tensor, capacity: int) -> None:
    """Where each of the lists begins and the last one ends, at most `capacity`."""
    kv_indptr[:1] = 0
    kv_indptr[1:] = length.cumsum(0).clamp(max=capacity).to(kv_indptr.dtype)


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, capacity = a["req_to_token"], a["out"].shape[0]
    rows = table.shape[0]
    lens = [extent(0, n)[1] for n in a["kv_lens"].tolist()]
    starts = [0] * len(lens) if a["kv_start"] is None else a["kv_start"].tolist()
    values: list[int] = []
    for r, start, n in zip(a["req_pool_indices"].tolist(), starts, lens, strict=True):
        stop = start + min(n, capacity - len(values))
        values += columns(table[r] if 0 <= r < rows else None, start, stop)
    return listing(values, lens, a)


def listing(values: list[int], lens: list[int], a: Mapping[str, Any]) -> dict[str, Want]:
    """What a packed list must be: `values` at the front of ``out``, the sums of `lens` in ``kv_indptr``."""
    out, indptr = a["out"], a["kv_indptr"]
    value = out.clone()
    value[: len(values)] = _host.tensor(values, dtype=out.dtype)
    named = _host.arange(out.shape[0]) < len(values)
    sums = _host.tensor([min(x, out.shape[0]) for x in accumulate(lens, initial=0)], dtype=indptr.dtype)
    listed = Want(named, (Candidate(value),))
    return {
        "kv_indptr": Want(torch.ones_like(sums, dtype=torch.bool), (Candidate(sums),)), "out": listed, "return": listed,
    }  # fmt: skip


def _make(
    seed: int = 0,
    bs: int = 5,
    requests: int = 9,
    width: int = 65,
    longest: int = 40,
    slack: int = 3,
    index: str = "i64",
    lens: str = "i64",
    indptr: str = "i32",
    out: str = "i32",
    start: str | None = None,
    view: str = "plain",
    values: str = "valid",
    skew: bool = False,
) -> dict[str, Any]:
    """`slack`: how many elements `out` has beyond the lengths' sum; negative: too few. `start`: dtype of kv_start."""
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    length = randint(g, 0, min(longest, width) + 1, (bs,))
    if skew and bs:
        length.zero_()
        length[bs // 2] = min(longest, width)
    begin = (_host.rand(bs, generator=g) * (width + 1 - length)).to(torch.int64)
    kv_lens = odd_indices(length, width + 1, values, INDEX_DTYPES[lens])
    total = sum(min(extent(0, n)[1], width + 1) for n in kv_lens.tolist())
    room = (max(0, total + slack),)
    kv_start = None
    if start is not None:
        kv_start = odd_indices(begin, width, values, INDEX_DTYPES[start]).roll(
            1 if values in ("edge", "extreme") else 0
        )
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(
            randint(g, 0, requests, (bs,)), requests, values, INDEX_DTYPES[index]
        ).roll(2 if values in ("edge", "extreme") else 0),
        "kv_lens": kv_lens,
        "kv_indptr": randint(g, 0, 2**31 - 1, (bs + 1,)).to(INDEX_DTYPES[indptr]),
        "out": randint(g, 0, 2**31 - 1, room).to(INDEX_DTYPES[out]),
        "kv_start": kv_start,
    }


def _check_sizes(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Any,
) -> None:
    check_indptr("build_kv_indices", kv_lens, kv_indptr)


def check_indptr(op: str, kv_lens: Tensor, kv_indptr: Tensor) -> None:
    """Raises unless kv_indptr has one entry more than there are requests."""
    if kv_indptr.shape[0] != kv_lens.shape[0] + 1:
        raise ArgumentError(op, "kv_indptr", f"[bs + 1] = [{kv_lens.shape[0] + 1}]", describe(kv_indptr))


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    check_range("build_kv_indices", "req_pool_indices", a["req_pool_indices"], -1, rows - 1)
    check_range("build_kv_indices", "kv_lens", a["kv_lens"], 0, min(width, LONGEST))
    if a["kv_start"] is not None:
        check_range("build_kv_indices", "kv_start", a["kv_start"], 0, width)


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=3, requests=4, width=8), **change}


SPEC = OpSpec(
    build_kv_indices,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "kv_lens": TensorArg("bs", INDEX),
        "kv_indptr": TensorArg("bs_and_1", INDEX, mutated=True),
        "out": TensorArg("capacity", INDEX, mutated=True),
        "kv_start": TensorArg("bs", INDEX, optional=True),
    },
    oracle=_oracle,
    returns="out",
    make=_make,
    check_sizes=_check_sizes,
    check_values=_check_values,
    samples=(
        *(
            Sample(f"{i}-{n}-{p}-{o}-start-{s}", {"index": i, "lens": n, "indptr": p, "out": o, "start": s})
            for i, n, p, o, s in (
                ("i32", "i32", "i32", "i32", "i32"), ("i64", "i64", "i64", "i64", "i64"),
                ("i32", "i64", "i32", "i64", "i32"), ("i64", "i32", "i64", "i32", None),
                ("i64", "i64", "i32", "i32", None),
            )
        ),
        Sample("one", {"bs": 1}),
        Sample("no-requests", {"bs": 0}),
        Sample("no-room", {"slack": -10_000}),
        Sample("too-little-room", {"bs": 20, "slack": -30}),
        Sample("exact-room", {"bs": 20, "slack": 0, "start": "i64"}),
        Sample("much-room", {"bs": 3, "slack": 5000}),
        Sample("past-one-block", {"bs": 1500, "requests": 64, "longest": 9}),
        Sample("long-row", {"bs": 3, "requests": 3, "width": 9000, "longest": 9000}),
        Sample("skewed", {"bs": 600, "width": 4000, "longest": 4000, "skew": True}),
        Sample("strided-table", {"view": "strided", "bs": 40, "start": "i32"}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 100, "start": "i64"}),
        Sample("edge-no-start", {"bs": 40, "values": "edge", "slack": 100}),
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300, "start": "i64"}),
        Sample(
            "extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "lens": "i32", "start": "i32", "slack": 99},
        ),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        ErrorSample(
            "table-of-int64", "req_to_token", lambda: _small(req_to_token=_host.zeros(4, 8, dtype=torch.int64)),
        ),
        ErrorSample("lens-float", "kv_lens", lambda: _small(kv_lens=_host.zeros(3))),
        ErrorSample("indptr-of-bs", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(3, dtype=torch.int32))),
        ErrorSample(
            "indptr-expanded", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(1, dtype=torch.int32).expand(4)),
        ),
        ErrorSample("out-of-rank-2", "out", lambda: _small(out=_host.zeros(3, 3, dtype=torch.int32))),
        ErrorSample("out-strided", "out", lambda: _small(out=_host.zeros(90, dtype=torch.int64)[::2])),
        ErrorSample("starts-too-many", "kv_start", lambda: _small(kv_start=_host.zeros(4, dtype=torch.int64))),
    ),
    ragged={
        "bs": (0, 300), "requests": (1, 40), "width": (1, 200), "longest": (0, 200), "slack": (-50, 50),
        "index": ("i32", "i64"), "lens": ("i32", "i64"), "indptr": ("i32", "i64"), "out": ("i32", "i64"),
        "start": ("i32", "i64", None), "view": ("plain", "strided"), "values": ("valid", "skip", "edge", "extreme"),
    },
    fresh=FRESH,
)  # fmt: skip
