"""build_kv_indices_from_blocks: the slots of all that each request attends to, packed, from a block table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._errors import ArgumentError
from hal.ops._spans import LONGEST, check_page_size, extent, extents, spread
from hal.ops.alloc_extend import largest_page, slot_in
from hal.ops.build_kv_indices import check_indptr, listing, write_sums
from hal.ops.get_last_loc import check_range
from hal.ops.proofs.fresh import COLUMNS, MANY, REQUESTS, TOKENS, Fresh, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, row_view
from hal.ops.proofs.judge import Want
from hal.ops.spec import INDEX, ErrorSample, OpSpec, Sample, TensorArg, ValueArg


def build_kv_indices_from_blocks(
    block_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    keep_last: int = -1,
) -> Tensor:
    """Packs the slots of each request's tokens ``start_i .. start_i + kv_lens[i]``, which its row of a block table
    places, into `out`, and says in `kv_indptr` where each begins: `build_kv_indices` for engines with block tables.

    Token p of request i lies in slot ``block_table[i, p // page_size] * page_size + p % page_size``. Of a request the
    last ``n_i = min(kv_lens[i], keep_last)`` of these tokens are listed (all of them where `keep_last` is -1), and
    ``kv_indptr[i] = sum(n_j for j < i)``. A token outside the table is -1, and so is one of a block that is below 0,
    or too large for all its slots to fit out's dtype; its position counts. What is left of `out` stays as it was, so a
    buffer made for the largest batch costs a small one nothing; nothing is written past it. A length that is not in
    [0, 2^31) is 0. Pages of 1 list the blocks themselves.

    Args:
        block_table: ``[bs, max_blocks]`` int32 or int64, the blocks (pages) of each request in the order of its
            tokens; may be a row-strided view. Any value is safe.
        kv_lens: ``[bs]`` int32 or int64, tokens of each request. Any value is safe.
        page_size: slots in a block, 1 to 2^30; any, not only a power of two. vLLM's ``block_size``.
        kv_indptr: ``[bs + 1]`` int32 or int64, overwritten; entries are at most capacity.
        out: ``[capacity]`` int32 or int64.
        kv_start: ``[bs]`` int32 or int64, the first token of each request; None is 0. Any value is safe.
        keep_last: how many tokens of each request are listed at most, its last ones; -1: all. A sliding window needs
            no more than those it sees: ``sliding_window + 1`` of `decode_attention`'s, ``sliding_window`` and the most
            new tokens of a request of `extend_attention`'s. So long a list costs time by the window, not by the length.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device, stride, page size or `keep_last`.

    Example:
        >>> import torch, hal
        >>> blocks = torch.tensor([[7, 2], [5, 0]], dtype=torch.int32)
        >>> indptr, out = torch.empty(3, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        >>> hal.build_kv_indices_from_blocks(blocks, torch.tensor([6, 3]), 4, indptr, out)
        tensor([28, 29, 30, 31,  8,  9, 20, 21, 22], dtype=torch.int32)
        >>> hal.build_kv_indices_from_blocks(blocks, torch.tensor([6, 3]), 4, indptr, out, keep_last=2)[:4], indptr
        (tensor([ 8,  9, 21, 22], dtype=torch.int32), tensor([0, 2, 4], dtype=torch.int32))

    Source: vLLM's block tables (Kwon et al., arXiv:2309.06180) as the lists that FlashInfer's wrappers take, which
    their users make on the host or by several operators of torch.
    """
    capacity = out.shape[0]
    _, whole = extents(torch.zeros_like(kv_lens), kv_lens)
    length = whole if keep_last < 0 else whole.clamp(max=min(keep_last, LONGEST))
    write_sums(length, kv_indptr, capacity)
    if kv_lens.shape[0] == 0 or capacity == 0:
        return out
    i, t, used = spread(length, capacity)
    end = block_table.shape[1] * page_size
    if end == 0:
        return out.copy_(torch.where(used, -1, out))
    t = t + (whole - length)[i]
    first = torch.zeros_like(t) if kv_start is None else kv_start.to(torch.int64)[i]
    # Compared before it is added, so that the sum can't wrap.
    valid = used & (first >= -t) & (first < end - t)
    position = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    block = block_table[i, position // page_size].to(torch.int64)
    valid = valid & (block >= 0) & (block <= largest_page(out.dtype, page_size))
    slot = torch.where(valid, block, 0) * page_size + position % page_size
    return out.copy_(torch.where(used, torch.where(valid, slot, -1), out))


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, page, out = a["block_table"].tolist(), a["page_size"], a["out"]
    whole = [extent(0, n)[1] for n in a["kv_lens"].tolist()]
    lens = [n if a["keep_last"] < 0 else min(n, a["keep_last"]) for n in whole]
    starts = [0] * len(lens) if a["kv_start"] is None else a["kv_start"].tolist()
    values: list[int] = []
    for row, start, n, m in zip(table, starts, whole, lens, strict=True):
        first = start + n - m
        for p in range(first, first + min(m, out.shape[0] - len(values))):
            inside = 0 <= p < len(row) * page
            values.append(slot_in(row[p // page], p, page, out.dtype) if inside else -1)
    return listing(values, lens, a)


def _make(
    seed: int = 0,
    bs: int = 5,
    blocks: int = 5,
    page_size: int = 16,
    longest: int = 70,
    slack: int = 3,
    table: str = "i32",
    lens: str = "i64",
    indptr: str = "i32",
    out: str = "i32",
    start: str | None = None,
    view: str = "plain",
    values: str = "valid",
    holes: bool = False,
    skew: bool = False,
    keep_last: int = -1,
) -> dict[str, Any]:
    """`slack`: how many elements `out` has beyond the lengths' sum; negative: too few. `holes`: blocks that are none,
    and the last that out's dtype can hold and the next. `start`: dtype of kv_start."""
    g = generator(seed)
    width = blocks * page_size
    last = min(largest_page(INDEX_DTYPES[out], page_size), torch.iinfo(INDEX_DTYPES[table]).max - 1)
    ids = randint(g, 0, last + 1, (bs, blocks))
    if holes:
        for i, block in enumerate((-1, last, last + 1, torch.iinfo(INDEX_DTYPES[table]).min)):
            ids.view(-1)[i::7] = block
    length = randint(g, 0, min(longest, width) + 1, (bs,))
    if skew and bs:
        length.zero_()
        length[bs // 2] = min(longest, width)
    begin = (_host.rand(bs, generator=g) * (width + 1 - length)).to(torch.int64)
    kv_lens = odd_indices(length, width + 1, values, INDEX_DTYPES[lens])
    listed = [min(extent(0, n)[1], width + 1) for n in kv_lens.tolist()]
    total = sum(n if keep_last < 0 else min(n, keep_last) for n in listed)
    kv_start = None
    if start is not None:
        kv_start = odd_indices(begin, width, values, INDEX_DTYPES[start])
        # One place on: an odd start must meet a valid length.
        kv_start = kv_start.roll(1 if values in ("edge", "extreme") else 0)
    return {
        "block_table": row_view(ids.to(INDEX_DTYPES[table]), view),
        "kv_lens": kv_lens,
        "page_size": page_size,
        "kv_indptr": randint(g, 0, 2**31 - 1, (bs + 1,)).to(INDEX_DTYPES[indptr]),
        "out": randint(g, 0, 2**31 - 1, (max(0, total + slack),)).to(INDEX_DTYPES[out]),
        "kv_start": kv_start,
        "keep_last": keep_last,
    }


def _check_sizes(
    block_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Any,
    keep_last: Any,
) -> None:
    # Not of the call's kind, which is checked once, but of each call.
    check_page_size("build_kv_indices_from_blocks", page_size)
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < -1:
        expected = "an int, -1 (all) or more"
        raise ArgumentError("build_kv_indices_from_blocks", "keep_last", expected, repr(keep_last))
    check_indptr("build_kv_indices_from_blocks", kv_lens, kv_indptr)


def _check_values(a: Mapping[str, Any]) -> None:
    op, width = "build_kv_indices_from_blocks", a["block_table"].shape[1] * a["page_size"]
    check_range(op, "kv_lens", a["kv_lens"], 0, min(width, LONGEST))
    if a["kv_start"] is not None:
        check_range(op, "kv_start", a["kv_start"], 0, width)


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=3, blocks=2, page_size=4), **change}


_LONG = {"bs": (8, 12), "blocks": (2400, 2600), "page_size": (30, 40)}
"""Tables in which the longest request has room."""

SPEC = OpSpec(
    build_kv_indices_from_blocks,
    args={
        "block_table": TensorArg("bs max_blocks", INDEX, stride="inner"),
        "kv_lens": TensorArg("bs", INDEX),
        "page_size": ValueArg(),
        "kv_indptr": TensorArg("bs_and_1", INDEX, mutated=True),
        "out": TensorArg("capacity", INDEX, mutated=True),
        "kv_start": TensorArg("bs", INDEX, optional=True),
        "keep_last": ValueArg(off=-1),
    },
    oracle=_oracle,
    returns="out",
    make=_make,
    check_sizes=_check_sizes,
    check_values=_check_values,
    samples=(
        *(
            Sample(f"{t}-{n}-{p}-{o}-start-{s}", {"table": t, "lens": n, "indptr": p, "out": o, "start": s})
            for t, n, p, o, s in (
                ("i32", "i32", "i32", "i32", "i32"), ("i64", "i64", "i64", "i64", "i64"),
                ("i32", "i64", "i32", "i64", None), ("i64", "i32", "i64", "i32", None),
                ("i32", "i32", "i32", "i32", None), ("i64", "i64", "i32", "i64", "i32"),
            )
        ),
        *(
            Sample(f"page-{p}", {"page_size": p, "blocks": 70 // p + 2, "bs": 20, "start": "i32"})
            for p in (1, 2, 3, 7, 64, 100)
        ),
        Sample("one", {"bs": 1}),
        Sample("no-requests", {"bs": 0}),
        Sample("no-room", {"slack": -10_000}),
        Sample("too-little-room", {"bs": 20, "slack": -30}),
        Sample("exact-room", {"bs": 20, "slack": 0, "start": "i64"}),
        Sample("much-room", {"bs": 3, "slack": 5000}),
        Sample("past-one-block", {"bs": 1500, "longest": 9, "blocks": 2}),
        Sample("long-row", {"bs": 3, "blocks": 600, "longest": 9000}),
        Sample("skewed", {"bs": 600, "blocks": 250, "longest": 4000, "skew": True}),
        Sample("holes", {"bs": 40, "holes": True}),
        Sample("holes-page-3", {"bs": 40, "holes": True, "page_size": 3, "blocks": 30, "table": "i64"}),
        Sample("holes-i64", {"bs": 40, "holes": True, "table": "i64", "out": "i64", "page_size": 5, "blocks": 15}),
        Sample("huge-page", {"page_size": 2**30, "blocks": 2, "longest": 3000}),
        *(Sample(f"keep-{n}", {"bs": 20, "keep_last": n, "start": "i32"}) for n in (0, 1, 17, 2**40)),
        Sample("keep-of-long-rows", {"bs": 9, "blocks": 600, "longest": 9000, "keep_last": 1030}),
        Sample("keep-of-many", {"bs": 1500, "longest": 9, "blocks": 2, "keep_last": 4}),
        Sample("strided-table", {"view": "strided", "bs": 40, "start": "i32"}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 100, "start": "i64", "page_size": 5, "blocks": 15}),
        Sample("edge-no-start", {"bs": 40, "values": "edge", "slack": 100}),
        Sample("edge-keep", {"bs": 40, "values": "edge", "slack": 100, "start": "i64", "keep_last": 7}),
        Sample(
            "extreme",
            {"bs": 41, "values": "extreme", "slack": 300, "start": "i64", "holes": True, "table": "i64"},
        ),
        Sample(
            "extreme-i32",
            {"bs": 41, "values": "extreme", "lens": "i32", "start": "i32", "slack": 99, "page_size": 3, "blocks": 30},
        ),
        Sample("extreme-keep", {"bs": 41, "values": "extreme", "slack": 300, "start": "i64", "keep_last": 40}),
        Sample("no-blocks", {"blocks": 0}),
        Sample("far-rows", {"bs": 5, "view": "far"}, large=True),
    ),
    errors=(
        ErrorSample("table-float", "block_table", lambda: _small(block_table=_host.zeros(3, 2))),
        ErrorSample(
            "table-transposed", "block_table", lambda: _small(block_table=_host.zeros(2, 3, dtype=torch.int32).T),
        ),
        ErrorSample(
            "table-of-rank-1", "block_table", lambda: _small(block_table=_host.zeros(3, dtype=torch.int32)),
        ),
        ErrorSample("rows-disagree", "kv_lens", lambda: _small(kv_lens=_host.zeros(4, dtype=torch.int64))),
        ErrorSample("lens-float", "kv_lens", lambda: _small(kv_lens=_host.zeros(3))),
        ErrorSample("page-zero", "page_size", lambda: _small(page_size=0)),
        ErrorSample("page-huge", "page_size", lambda: _small(page_size=2**30 + 1)),
        ErrorSample("page-float", "page_size", lambda: _small(page_size=16.0)),
        ErrorSample("page-true", "page_size", lambda: _small(page_size=True)),
        ErrorSample("indptr-of-bs", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(3, dtype=torch.int32))),
        ErrorSample(
            "indptr-expanded", "kv_indptr", lambda: _small(kv_indptr=_host.zeros(1, dtype=torch.int32).expand(4)),
        ),
        ErrorSample("out-of-rank-2", "out", lambda: _small(out=_host.zeros(3, 3, dtype=torch.int32))),
        ErrorSample("out-strided", "out", lambda: _small(out=_host.zeros(90, dtype=torch.int64)[::2])),
        ErrorSample("starts-too-many", "kv_start", lambda: _small(kv_start=_host.zeros(4, dtype=torch.int64))),
        ErrorSample("keep-minus-2", "keep_last", lambda: _small(keep_last=-2)),
        ErrorSample("keep-float", "keep_last", lambda: _small(keep_last=3.0)),
        ErrorSample("keep-none", "keep_last", lambda: _small(keep_last=None)),
    ),
    ragged={
        "bs": (0, 300), "blocks": (0, 20), "page_size": (1, 40), "longest": (0, 200), "slack": (-50, 50),
        "table": ("i32", "i64"), "lens": ("i32", "i64"), "indptr": ("i32", "i64"), "out": ("i32", "i64"),
        "start": ("i32", "i64", None), "view": ("plain", "strided"), "values": ("valid", "skip", "edge", "extreme"),
        "holes": (False, True), "keep_last": (-1, 60),
    },
    fresh=Fresh(
        {
            "bs": Wide(REQUESTS, {"longest": (1, 12)}),
            # Far blocks are read where lists begin far on.
            "blocks": Wide(COLUMNS, {"bs": (30, 40), "start": ["i32", "i64"], "page_size": (1, 40)}),
            "page_size": Wide((257, 1024), {"bs": MANY}),
            "longest": Wide(TOKENS, _LONG),
            "slack": Wide(TOKENS, {"bs": MANY}),
            "keep_last": Wide((16_385, 40_000), {**_LONG, "longest": TOKENS}),
        },
        lambda p: p["bs"] * (8 + p["blocks"] + p["longest"] // 2) + max(p["slack"], 0),
    ),
)  # fmt: skip
