"""write_req_to_token: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hal import _host
from hal.ops._spans import LONGEST
from hal.ops.assign_extend_cache_locs import SPEC as ASSIGN
from hal.ops.proofs.assign_extend_cache_locs import FRESH
from hal.ops.proofs.fresh import REQUESTS, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, of_dtypes, randint, refused
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, src = a["req_to_token"], a["src"].tolist()
    rows, width = table.shape
    rounds: list[tuple[list[int], list[int], list[int]]] = []
    named = _host.zeros(table.shape, dtype=torch.bool)
    seen: dict[tuple[int, int], int] = {}
    at = 0
    lists = (a[n].tolist() for n in ("req_pool_indices", "start_offsets", "end_offsets"))
    for r, start, end in zip(*lists, strict=True):
        length = min(max(end - start, 0), len(src) - at)
        for c, slot in zip(range(start, start + length), src[at : at + length], strict=True):
            if 0 <= r < rows and 0 <= c < width and 0 <= slot <= LONGEST:
                turn = seen[r, c] = seen.get((r, c), -1) + 1
                if turn == len(rounds):
                    rounds.append(([], [], []))
                for values, value in zip(rounds[turn], (r, c, slot), strict=True):
                    values.append(value)
        at += length
    candidates, value = [], table
    for row, column, slots in rounds:
        # An element that is not written again keeps its last candidate.
        value = value.clone()
        value[row, column] = _host.tensor(slots, dtype=table.dtype)
        named[row, column] = True
        candidates.append(Candidate(value))
    return {"req_to_token": Want(named, tuple(candidates))}


def make(seed: int = 0, src: str = "i64", slots: str = "valid", **params: Any) -> dict[str, Any]:
    """Those of `assign_extend_cache_locs`; `slots`: ``valid``, ``skip``, ``extreme``, ``none``."""
    a = ASSIGN.make(seed=seed, out=src, **params)
    out = a.pop("out")
    g = generator(seed + 1)
    locs = randint(g, 0, 2**31 - 1, tuple(out.shape))
    info = torch.iinfo(INDEX_DTYPES[src])
    if slots == "skip":
        locs[::3] = -1
    elif slots == "none":
        locs[:] = -1
    elif slots == "extreme":
        for k, value in enumerate((-1, info.min, info.max, -2)):
            locs[k::7] = value
    return {**a, "src": locs.to(INDEX_DTYPES[src])}


_bad = refused(make, bs=3, requests=4, width=8, longest=4)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *of_dtypes("index offsets src", "i32 i32 i32", "i64 i64 i64", "i32 i64 i32", "i64 i32 i64"),
        Sample("one", {"bs": 1, "longest": 9}),
        Sample("no-requests", {"bs": 0}, control="one"),
        Sample("no-slots", {"slack": -10_000}, control="one"),
        Sample("all-skipped", {"slots": "none", "bs": 9}, control="one"),
        Sample("too-few-slots", {"bs": 20, "slack": -30}),
        Sample("exact", {"bs": 20, "slack": 0}),
        Sample("past-one-block", {"bs": 1500, "requests": 1500, "width": 8, "longest": 5}),
        Sample("long-row", {"bs": 3, "requests": 3, "width": 9000, "longest": 9000}),
        Sample("skewed", {"bs": 600, "width": 4000, "longest": 4000, "skew": True}),
        Sample("strided-table", {"view": "strided", "bs": 40}),
        Sample("skip", {"bs": 20, "slots": "skip"}),
        Sample("extreme-slots", {"bs": 20, "slots": "extreme"}),
        Sample("extreme-slots-i32", {"bs": 20, "slots": "extreme", "src": "i32"}),
        Sample("negative-lengths", {"bs": 41, "values": "negative"}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 300}),
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300}),
        Sample("extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "offsets": "i32", "slack": 300}),
        Sample("no-rows", {"requests": 0}, control="one"),
        Sample("no-columns", {"width": 0}, control="one"),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        _bad("table-of-int64", req_to_token=lambda: _host.zeros(4, 8, dtype=torch.int64)),
        _bad("table-expanded", req_to_token=lambda: _host.zeros(1, 8, dtype=torch.int32).expand(4, 8)),
        _bad("src-float", src=lambda: _host.zeros(9)),
        _bad("src-strided", src=lambda: _host.zeros(18, dtype=torch.int64)[::2]),
        _bad("lengths-disagree", end_offsets=lambda: _host.ones(4, dtype=torch.int64)),
    ),
    ragged={
        "bs": (0, 300),
        "requests": (1, 40),
        "width": (1, 200),
        "longest": (0, 200),
        "slack": (-50, 50),
        "index": ("i32", "i64"),
        "offsets": ("i32", "i64"),
        "src": ("i32", "i64"),
        "view": ("plain", "strided"),
        "values": ("valid", "skip", "negative", "edge", "extreme"),
        "slots": ("valid", "skip", "extreme"),
    },
    # Few requests share a row: each that does is another candidate.
    fresh=replace(
        FRESH,
        wide={**FRESH.wide, "bs": Wide(REQUESTS, {"requests": (30_000, 40_000), "width": (8, 12), "longest": (1, 8)})},
    ),
)
