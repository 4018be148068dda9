"""get_last_loc: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hal import _host
from hal.ops.proofs.fresh import table_fresh
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, refused, row_view
from hal.ops.proofs.judge import Want, exactly
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, requests, lens = a["req_to_token"], a["req_pool_indices"].tolist(), a["prefix_lens"].tolist()
    rows, width = table.shape
    out = [
        int(table[r, p - 1]) if 0 <= r < rows and 0 < p <= width else -1 for r, p in zip(requests, lens, strict=True)
    ]
    return {"return": exactly(out, a["prefix_lens"].dtype)}


def make(
    seed: int = 0,
    bs: int = 5,
    requests: int = 9,
    width: int = 33,
    index: str = "i64",
    lens: str = "i64",
    view: str = "plain",
    values: str = "valid",
) -> dict[str, Any]:
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(randint(g, 0, requests, (bs,)), requests, values, INDEX_DTYPES[index]),
        # One place on: an odd length must meet a valid request, or the request alone decides.
        "prefix_lens": odd_indices(
            randint(g, 1, width + 1, (bs,)), width + 1, "valid" if values == "equal" else values, INDEX_DTYPES[lens]
        ).roll(1),
    }


_bad = refused(make, bs=3, requests=4, width=8)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{i}-{p}", {"index": i, "lens": p}) for i in ("i32", "i64") for p in ("i32", "i64")),
        Sample("one", {"bs": 1}),
        Sample("empty", {"bs": 0}, control="one"),
        Sample("past-one-block", {"bs": 1500, "requests": 64}),
        Sample("strided-table", {"view": "strided"}),
        Sample("edge", {"bs": 40, "values": "edge"}),
        Sample("edge-i32", {"bs": 40, "values": "edge", "index": "i32", "lens": "i32", "view": "strided"}),
        Sample("extreme", {"bs": 41, "values": "extreme"}),
        Sample("extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "lens": "i32"}),
        Sample("no-request", {"bs": 7, "values": "none"}),
        Sample("one-request-many-times", {"bs": 70, "values": "equal"}),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        _bad("table-of-int64", req_to_token=lambda: _host.zeros(4, 8).long()),
        _bad("table-of-rank-1", req_to_token=lambda: _host.zeros(8, dtype=torch.int32)),
        _bad("table-transposed", req_to_token=lambda: _host.zeros(8, 4, dtype=torch.int32).T),
        _bad("float-requests", req_pool_indices=lambda: _host.zeros(3)),
        _bad("lengths-disagree", prefix_lens=lambda: _host.ones(4, dtype=torch.int64)),
        _bad("lens-strided", prefix_lens=lambda: _host.ones(6, dtype=torch.int64)[::2]),
        _bad("lens-a-list", prefix_lens=[1, 2, 3]),
        _bad("lens-none", prefix_lens=None),
    ),
    ragged={
        "bs": (0, 300),
        "requests": (1, 40),
        "width": (1, 80),
        "index": ("i32", "i64"),
        "lens": ("i32", "i64"),
        "view": ("plain", "strided"),
        "values": ("valid", "skip", "edge", "extreme"),
    },
    # Every other request is skipped, and every other length beside it: "skip" leaves nothing to find.
    fresh=replace(table_fresh({}), beside={"values": ("valid", "edge", "extreme")}),
)
