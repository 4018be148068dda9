"""build_page_table: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal import _host
from hal.ops.proofs.alloc_extend import PAGE_ERRORS
from hal.ops.proofs.fresh import COLUMNS, MANY, PAIRS, Wide, table_fresh
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, of_dtypes, randint, refused, row_view
from hal.ops.proofs.judge import Want, exactly
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, out, page = a["req_to_token"], a["out"], a["page_size"]
    rows, width = table.shape
    value = _host.full(out.shape, -1, dtype=out.dtype)
    for i, (r, n) in enumerate(zip(a["req_pool_indices"].tolist(), a["kv_lens"].tolist(), strict=True)):
        if 0 <= r < rows:
            firsts = table[r, : min(max(n, 0), width) : page].tolist()[: out.shape[1]]
            value[i, : len(firsts)] = _host.tensor([s // page if s >= 0 else -1 for s in firsts], dtype=out.dtype)
    full = exactly(value, out.dtype)
    return {"out": full, "return": full}


def make(
    seed: int = 0,
    bs: int = 5,
    requests: int = 9,
    width: int = 65,
    page_size: int = 16,
    pages: int = 6,
    index: str = "i64",
    lens: str = "i64",
    out: str = "i32",
    view: str = "plain",
    out_view: str = "plain",
    values: str = "valid",
    holes: bool = False,
) -> dict[str, Any]:
    """`holes`: some slots of the table are below 0."""
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    if holes:
        table[::2, ::3] = -1
        table[1::2, ::2] = torch.iinfo(torch.int32).min
    fill = randint(g, 0, 2**31 - 1, (bs, pages)).to(INDEX_DTYPES[out])
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(randint(g, 0, requests, (bs,)), requests, values, INDEX_DTYPES[index], by=1),
        "kv_lens": odd_indices(randint(g, 0, width + 1, (bs,)), width + 1, values, INDEX_DTYPES[lens]),
        "page_size": page_size,
        "out": row_view(fill, out_view),
    }


_bad = refused(make, bs=3, requests=4, width=8, page_size=2)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *of_dtypes("index lens out", "i32 i32 i32", "i64 i64 i64", "i32 i64 i64", "i64 i32 i32"),
        *(Sample(f"page-{p}", {"page_size": p, "pages": 70 // p + 2, "bs": 20}) for p in (1, 3, 7, 64)),
        Sample("one", {"bs": 1}),
        Sample("empty", {"bs": 0}, control="one"),
        Sample("no-pages", {"pages": 0}, control="one"),
        Sample("too-few-columns", {"pages": 2, "page_size": 4}),
        Sample("past-one-block", {"bs": 300, "requests": 64, "width": 3000, "page_size": 2, "pages": 1400}),
        Sample("huge-page", {"page_size": 2**30, "pages": 5000}),
        Sample("holes", {"bs": 40, "holes": True, "page_size": 1, "pages": 60}),
        Sample("strided-table", {"view": "strided", "bs": 40}),
        Sample("strided-out", {"out_view": "strided", "bs": 40}),
        Sample("edge", {"bs": 40, "values": "edge", "page_size": 5, "pages": 15}),
        Sample("extreme", {"bs": 41, "values": "extreme", "page_size": 5, "pages": 15}),
        Sample(
            "extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "lens": "i32", "page_size": 3, "pages": 30}
        ),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        _bad("table-of-int64", req_to_token=lambda: _host.zeros(4, 8, dtype=torch.int64)),
        *(_bad(name, page_size=value) for name, value in PAGE_ERRORS.items()),
        _bad("out-of-rank-1", out=lambda: _host.zeros(3, dtype=torch.int32)),
        _bad("out-rows-disagree", out=lambda: _host.zeros(4, 3, dtype=torch.int32)),
        _bad("out-transposed", out=lambda: _host.zeros(4, 3, dtype=torch.int32).T),
        _bad("lens-float", kv_lens=lambda: _host.zeros(3)),
    ),
    ragged={
        "bs": (0, 90),
        "requests": (1, 40),
        "width": (1, 200),
        "page_size": (1, 70),
        "pages": (0, 90),
        "index": ("i32", "i64"),
        "lens": ("i32", "i64"),
        "out": ("i32", "i64"),
        "view": ("plain", "strided"),
        "out_view": ("plain", "strided"),
        "values": ("valid", "skip", "edge", "extreme"),
        "holes": (False, True),
    },
    fresh=table_fresh(
        {"pages": (1, 8), "page_size": (1, 3)},
        width=Wide(COLUMNS, {"bs": MANY, "requests": (30, 40), "page_size": (50, 70), "pages": (330, 400)}),
        pages=Wide(PAIRS, {"bs": (20, 30), "requests": (30, 40), "page_size": (1, 2), "width": COLUMNS}),
    ),
)
