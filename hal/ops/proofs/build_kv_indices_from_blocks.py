"""build_kv_indices_from_blocks: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal import _host
from hal.ops._spans import extent
from hal.ops.alloc_extend import largest_page
from hal.ops.proofs.alloc_extend import PAGE_ERRORS, slot_in
from hal.ops.proofs.build_kv_indices import listing
from hal.ops.proofs.fresh import COLUMNS, MANY, REQUESTS, TOKENS, Fresh, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, refused, row_view, spans
from hal.ops.proofs.judge import Want
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
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


def make(
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
    begin, length = spans(g, bs, width, longest, skew)
    kv_lens = odd_indices(length, width + 1, values, INDEX_DTYPES[lens])
    listed = [min(extent(0, n)[1], width + 1) for n in kv_lens.tolist()]
    total = sum(n if keep_last < 0 else min(n, keep_last) for n in listed)
    return {
        "block_table": row_view(ids.to(INDEX_DTYPES[table]), view),
        "kv_lens": kv_lens,
        "page_size": page_size,
        "kv_indptr": randint(g, 0, 2**31 - 1, (bs + 1,)).to(INDEX_DTYPES[indptr]),
        "out": randint(g, 0, 2**31 - 1, (max(0, total + slack),)).to(INDEX_DTYPES[out]),
        # One place on: an odd start must meet a valid length.
        "kv_start": None if start is None else odd_indices(begin, width, values, INDEX_DTYPES[start], by=1),
        "keep_last": keep_last,
    }


_bad = refused(make, bs=3, blocks=2, page_size=4)


_LONG = {"bs": (8, 12), "blocks": (2400, 2600), "page_size": (30, 40)}
"""Tables in which the longest request has room."""


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(
            Sample(f"{t}-{n}-{p}-{o}-start-{s}", {"table": t, "lens": n, "indptr": p, "out": o, "start": s})
            for t, n, p, o, s in (
                ("i32", "i32", "i32", "i32", "i32"),
                ("i64", "i64", "i64", "i64", "i64"),
                ("i32", "i64", "i32", "i64", None),
                ("i64", "i32", "i64", "i32", None),
                ("i32", "i32", "i32", "i32", None),
                ("i64", "i64", "i32", "i64", "i32"),
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
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300, "start": "i64", "holes": True, "table": "i64"}),
        Sample(
            "extreme-i32",
            {"bs": 41, "values": "extreme", "lens": "i32", "start": "i32", "slack": 99, "page_size": 3, "blocks": 30},
        ),
        Sample("extreme-keep", {"bs": 41, "values": "extreme", "slack": 300, "start": "i64", "keep_last": 40}),
        Sample("no-blocks", {"blocks": 0}),
        Sample("far-rows", {"bs": 5, "view": "far"}, large=True),
    ),
    errors=(
        _bad("table-float", block_table=lambda: _host.zeros(3, 2)),
        _bad("table-transposed", block_table=lambda: _host.zeros(2, 3, dtype=torch.int32).T),
        _bad("table-of-rank-1", block_table=lambda: _host.zeros(3, dtype=torch.int32)),
        _bad("rows-disagree", kv_lens=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("lens-float", kv_lens=lambda: _host.zeros(3)),
        *(_bad(name, page_size=value) for name, value in PAGE_ERRORS.items()),
        _bad("indptr-of-bs", kv_indptr=lambda: _host.zeros(3, dtype=torch.int32)),
        _bad("indptr-expanded", kv_indptr=lambda: _host.zeros(1, dtype=torch.int32).expand(4)),
        _bad("out-of-rank-2", out=lambda: _host.zeros(3, 3, dtype=torch.int32)),
        _bad("out-strided", out=lambda: _host.zeros(90, dtype=torch.int64)[::2]),
        _bad("starts-too-many", kv_start=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("keep-minus-2", keep_last=-2),
        _bad("keep-float", keep_last=3.0),
        _bad("keep-none", keep_last=None),
    ),
    ragged={
        "bs": (0, 300),
        "blocks": (0, 20),
        "page_size": (1, 40),
        "longest": (0, 200),
        "slack": (-50, 50),
        "table": ("i32", "i64"),
        "lens": ("i32", "i64"),
        "indptr": ("i32", "i64"),
        "out": ("i32", "i64"),
        "start": ("i32", "i64", None),
        "view": ("plain", "strided"),
        "values": ("valid", "skip", "edge", "extreme"),
        "holes": (False, True),
        "keep_last": (-1, 60),
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
)
