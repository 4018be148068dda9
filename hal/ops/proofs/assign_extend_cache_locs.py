"""assign_extend_cache_locs: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal import _host
from hal.ops._spans import columns
from hal.ops.proofs.fresh import MANY, TOKENS, Wide, table_fresh
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, of_dtypes, randint, refused, row_view, spans
from hal.ops.proofs.judge import Want, exactly
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, out = a["req_to_token"], a["out"]
    rows, capacity = table.shape[0], out.shape[0]
    want: list[int] = []
    lists = (a[n].tolist() for n in ("req_pool_indices", "start_offsets", "end_offsets"))
    for r, start, end in zip(*lists, strict=True):
        if len(want) >= capacity:
            break
        stop = min(end, start + capacity - len(want))
        want += columns(table[r] if 0 <= r < rows else None, start, stop)
    full = exactly(want + [-1] * (capacity - len(want)), out.dtype)
    return {"out": full, "return": full}


def make(
    seed: int = 0,
    bs: int = 5,
    requests: int = 9,
    width: int = 65,
    longest: int = 16,
    slack: int = 3,
    index: str = "i64",
    offsets: str = "i64",
    out: str = "i64",
    view: str = "plain",
    values: str = "valid",
    skew: bool = False,
) -> dict[str, Any]:
    """`slack`: how many elements `out` has beyond the lengths' sum; negative: too few."""
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    start, length = spans(g, bs, width, longest, skew)
    end = start + length
    dtype = INDEX_DTYPES[offsets]
    ends = end.clone()
    if values == "negative":
        ends[::2] = start[::2] - 1 - randint(g, 0, 5, (len(ends[::2]),))
        ends[:1] = torch.iinfo(dtype).min
    elif values in ("edge", "extreme"):
        ends = odd_indices(end, width + 1, values, dtype).to(torch.int64).roll(1)
        start = odd_indices(start, width, values, dtype).to(torch.int64)
    capacity = max(0, int((end - start).clamp(0, longest).sum()) + slack)
    fill = randint(g, 0, 2**31 - 1, (capacity,))
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(
            randint(g, 0, requests, (bs,)), requests, "valid" if values == "negative" else values, INDEX_DTYPES[index]
        ),
        "start_offsets": start.to(dtype),
        "end_offsets": ends.to(dtype),
        "out": fill.to(INDEX_DTYPES[out]),
    }


_bad = refused(make, bs=3, requests=4, width=8, longest=4)


FRESH = table_fresh(
    {"longest": (1, 12)},
    longest=Wide(TOKENS, {"bs": (8, 12), "requests": (30, 40), "width": (70_001, 80_000)}),
    slack=Wide(TOKENS, {"bs": MANY}),
)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *of_dtypes("index offsets out", "i32 i32 i32", "i64 i64 i64", "i32 i64 i32", "i64 i32 i64"),
        Sample("one", {"bs": 1, "longest": 9}),
        Sample("no-requests", {"bs": 0}),
        Sample("no-room", {"slack": -10_000}, control="one"),
        Sample("too-little-room", {"bs": 20, "slack": -30}),
        Sample("exact-room", {"bs": 20, "slack": 0}),
        Sample("much-room", {"bs": 3, "slack": 5000}),
        Sample("past-one-block", {"bs": 1500, "requests": 64, "longest": 5}),
        Sample("long-row", {"bs": 3, "requests": 3, "width": 9000, "longest": 9000}),
        Sample("skewed", {"bs": 600, "width": 4000, "longest": 4000, "skew": True}),
        Sample("strided-table", {"view": "strided", "bs": 40}),
        Sample("negative-lengths", {"bs": 41, "values": "negative"}),
        Sample("negative-lengths-i32", {"bs": 41, "values": "negative", "offsets": "i32"}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 300}),
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300}),
        Sample("extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "offsets": "i32", "slack": 300}),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        _bad("table-of-int64", req_to_token=lambda: _host.zeros(4, 8).long()),
        _bad("out-float", out=lambda: _host.zeros(9)),
        _bad("out-strided", out=lambda: _host.zeros(18, dtype=torch.int64)[::2]),
        _bad("out-of-rank-2", out=lambda: _host.zeros(3, 3, dtype=torch.int64)),
        _bad("out-expanded", out=lambda: _host.zeros(1, dtype=torch.int64).expand(9)),
        _bad("lengths-disagree", end_offsets=lambda: _host.ones(4, dtype=torch.int64)),
        _bad("starts-bool", start_offsets=lambda: _host.ones(3, dtype=torch.bool)),
    ),
    ragged={
        "bs": (0, 300),
        "requests": (1, 40),
        "width": (1, 200),
        "longest": (0, 200),
        "slack": (-50, 50),
        "index": ("i32", "i64"),
        "offsets": ("i32", "i64"),
        "out": ("i32", "i64"),
        "view": ("plain", "strided"),
        "values": ("valid", "skip", "negative", "edge", "extreme"),
    },
    fresh=FRESH,
)
