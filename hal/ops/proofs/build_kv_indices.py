"""build_kv_indices: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from hal import _host
from hal.ops._spans import columns, extent
from hal.ops.proofs.assign_extend_cache_locs import FRESH
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, refused, row_view, spans
from hal.ops.proofs.judge import Candidate, Want, exactly
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, capacity = a["req_to_token"], a["out"].shape[0]
    rows = table.shape[0]
    lens = [extent(0, n)[1] for n in a["kv_lens"].tolist()]
    starts = [0] * len(lens) if a["kv_start"] is None else a["kv_start"].tolist()
    if a["given_indptr"] is not None:
        return place_lists(a, lens, starts)
    values: list[int] = []
    for r, start, n in zip(a["req_pool_indices"].tolist(), starts, lens, strict=True):
        stop = start + min(n, capacity - len(values))
        values += columns(table[r] if 0 <= r < rows else None, start, stop)
    return listing(values, lens, a)


def place_lists(a: Mapping[str, Any], lens: list[int], starts: list[int]) -> dict[str, Want]:
    """Each list where ``given_indptr`` says; of an element that several claim, any."""
    table, out, indptr = a["req_to_token"], a["out"], a["given_indptr"].tolist()
    rows, capacity = table.shape[0], out.shape[0]
    claims: list[list[int]] = [[] for _ in range(capacity)]
    for i, (r, n) in enumerate(zip(a["req_pool_indices"].tolist(), lens, strict=True)):
        begin = indptr[i]
        low, high = max(begin, 0), min(begin + n, indptr[i + 1], capacity)
        if low < high:
            found = columns(table[r] if 0 <= r < rows else None, starts[i] + low - begin, starts[i] + high - begin)
            for o, value in zip(range(low, high), found, strict=True):
                claims[o].append(value)
    named = _host.tensor([bool(c) for c in claims], dtype=torch.bool)
    values = [out.clone() for _ in range(max(map(len, claims), default=0))]
    for k, value in enumerate(values):
        value[named] = _host.tensor([c[min(k, len(c) - 1)] for c in claims if c], dtype=out.dtype)
    listed = Want(named, tuple(map(Candidate, values)))
    return {"out": listed, "return": listed}


def listing(values: list[int], lens: list[int], a: Mapping[str, Any]) -> dict[str, Want]:
    """What a packed list must be: `values` at the front of ``out``, the sums of `lens` in ``kv_indptr``."""
    out, indptr = a["out"], a["kv_indptr"]
    value = out.clone()
    value[: len(values)] = _host.tensor(values, dtype=out.dtype)
    named = _host.arange(out.shape[0]) < len(values)
    sums = [min(x, out.shape[0]) for x in accumulate(lens, initial=0)]
    listed = Want(named, (Candidate(value),))
    return {"kv_indptr": exactly(sums, indptr.dtype), "out": listed, "return": listed}


def make(
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
    given: str | None = None,
) -> dict[str, Any]:
    """`slack`: how many elements `out` has beyond the lengths' sum; negative: too few. `start`: dtype of kv_start.
    `given`: how given_indptr is, of dtype `indptr`: see `_make_indptr`."""
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    begin, length = spans(g, bs, width, longest, skew)
    kv_lens = odd_indices(length, width + 1, values, INDEX_DTYPES[lens])
    total = sum(min(extent(0, n)[1], width + 1) for n in kv_lens.tolist())
    room = (max(0, total + slack),)
    sums = randint(g, 0, 2**31 - 1, (bs + 1,)).to(INDEX_DTYPES[indptr])
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(randint(g, 0, requests, (bs,)), requests, values, INDEX_DTYPES[index], by=2),
        "kv_lens": kv_lens,
        "kv_indptr": sums if given is None else None,
        "out": randint(g, 0, 2**31 - 1, room).to(INDEX_DTYPES[out]),
        "kv_start": None if start is None else odd_indices(begin, width, values, INDEX_DTYPES[start], by=1),
        "given_indptr": None if given is None else _make_indptr(given, kv_lens.tolist(), INDEX_DTYPES[indptr]),
    }


def _make_indptr(kind: str, lens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """``sums`` of the lengths; ``apart``, 3 more each; ``tight``, 2 fewer; ``early``, the sums before `out` begins;
    ``falling``, from the last to the first; ``extreme``, ascending from the smallest number to the largest."""
    more = {"apart": 3, "tight": -2}.get(kind, 0)
    sums = list(accumulate((max(0, extent(0, n)[1] + more) for n in lens), initial=0))
    info = torch.iinfo(dtype)
    if kind == "early":
        sums = [x - sums[-1] // 2 for x in sums]
    elif kind == "falling":
        sums.reverse()
    elif kind == "extreme":
        n = len(sums)
        sums = [info.min if 3 * i < n else x if 3 * i < 2 * n else info.max for i, x in enumerate(sums)]
    return _host.tensor(sums, dtype=torch.int64).clamp(info.min, info.max).to(dtype)


_bad = refused(make, bs=3, requests=4, width=8)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(
            Sample(f"{i}-{n}-{p}-{o}-start-{s}", {"index": i, "lens": n, "indptr": p, "out": o, "start": s})
            for i, n, p, o, s in (
                ("i32", "i32", "i32", "i32", "i32"),
                ("i64", "i64", "i64", "i64", "i64"),
                ("i32", "i64", "i32", "i64", "i32"),
                ("i64", "i32", "i64", "i32", None),
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
            "extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "lens": "i32", "start": "i32", "slack": 99}
        ),
        *(
            Sample(f"given-{n}", {"given": "sums", "bs": 40, "index": i, "lens": i, "indptr": i, "out": i, **more})
            for n, i, more in (
                ("i32", "i32", {}),
                ("i64", "i64", {"start": "i64"}),
                ("too-little-room", "i64", {"slack": -30}),
                ("long-row", "i32", {"bs": 3, "requests": 3, "width": 9000, "longest": 9000}),
                ("many", "i64", {"bs": 600, "longest": 9}),
                ("no-rows", "i32", {"requests": 0}),
                ("extreme-lengths", "i64", {"values": "extreme", "slack": 300, "start": "i64"}),
                ("extreme-lengths-i32", "i32", {"values": "extreme", "slack": 99, "start": "i32"}),
            )
        ),
        *(
            Sample(f"given-{kind}-{i}", {"given": kind, "bs": 41, "lens": i, "indptr": i, "start": i, "slack": 100})
            for kind in ("apart", "tight", "early", "extreme")
            for i in ("i32", "i64")
        ),
        *(
            Sample(f"given-{n}", {"given": "falling", "bs": 41, **more}, control="given-i32")
            for n, more in (("falling", {}), ("no-requests", {"bs": 0}), ("no-room", {"slack": -10_000}))
        ),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        _bad("table-of-int64", req_to_token=lambda: _host.zeros(4, 8, dtype=torch.int64)),
        _bad("lens-float", kv_lens=lambda: _host.zeros(3)),
        _bad("indptr-of-bs", kv_indptr=lambda: _host.zeros(3, dtype=torch.int32)),
        _bad("indptr-expanded", kv_indptr=lambda: _host.zeros(1, dtype=torch.int32).expand(4)),
        _bad("out-of-rank-2", out=lambda: _host.zeros(3, 3, dtype=torch.int32)),
        _bad("out-strided", out=lambda: _host.zeros(90, dtype=torch.int64)[::2]),
        _bad("starts-too-many", kv_start=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("given-and-asked-for", given_indptr=lambda: _host.zeros(4, dtype=torch.int32)),
        _bad("given-of-bs", given_indptr=lambda: _host.zeros(3, dtype=torch.int32), kv_indptr=None),
        _bad("given-float", given_indptr=lambda: _host.zeros(4), kv_indptr=None),
        refused(make, bs=3, given="sums")("neither", given_indptr=None),
    ),
    ragged={
        "bs": (0, 300),
        "requests": (1, 40),
        "width": (1, 200),
        "longest": (0, 200),
        "slack": (-50, 50),
        "index": ("i32", "i64"),
        "lens": ("i32", "i64"),
        "indptr": ("i32", "i64"),
        "out": ("i32", "i64"),
        "start": ("i32", "i64", None),
        "given": (None, "sums", "apart", "tight", "early"),
        "view": ("plain", "strided"),
        "values": ("valid", "skip", "edge", "extreme"),
    },
    fresh=FRESH,
)
