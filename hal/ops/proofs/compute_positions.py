"""compute_positions: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.ops._spans import extent
from hal.ops.proofs.fresh import MANY, REQUESTS, ROWS, TOKENS, Fresh, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, of_dtypes, randint, refused
from hal.ops.proofs.judge import Want, exactly
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    out, indptr = a["out"], a["indptr"]
    capacity = out.shape[0]
    spans = [extent(p, s) for p, s in zip(a["prefix_lens"].tolist(), a["seq_lens"].tolist(), strict=True)]
    values: list[int] = []
    for prefix, seq in spans:
        values += range(prefix, min(seq, prefix + capacity - len(values)))
    full = exactly(values + [-1] * (capacity - len(values)), out.dtype)
    want = {"out": full, "return": full}
    if indptr is not None:
        sums = accumulate((s - p for p, s in spans), initial=0)
        want["indptr"] = exactly([min(x, capacity) for x in sums], indptr.dtype)
    return want


def lengths(
    g: torch.Generator,
    bs: int,
    prefix: int,
    longest: int,
    dtype: torch.dtype,
    values: str = "valid",
    skew: bool = False,
) -> tuple[Tensor, Tensor]:
    """(prefix_lens, seq_lens) with prefixes up to `prefix` and up to `longest` new tokens each."""
    first, new = randint(g, 0, prefix + 1, (bs,)), randint(g, 0, longest + 1, (bs,))
    if skew and bs:
        new.zero_()
        new[bs // 2] = longest
    seq = first + new
    if values == "negative":
        seq[::2] = first[::2] - 1 - randint(g, 0, 3, (len(seq[::2]),))
    elif values in ("edge", "extreme"):
        seq = odd_indices(seq, prefix + 1, values, dtype).to(torch.int64)
        first = odd_indices(first, prefix + 1, values, dtype).to(torch.int64).roll(1)
    return first.to(dtype), seq.to(dtype)


def make(
    seed: int = 0,
    bs: int = 5,
    prefix: int = 40,
    longest: int = 16,
    slack: int = 3,
    lens: str = "i64",
    out: str = "i64",
    indptr: str | None = "i32",
    values: str = "valid",
    skew: bool = False,
) -> dict[str, Any]:
    """`slack`: how many elements `out` has beyond the lengths' sum; negative: too few."""
    g = generator(seed)
    first, seq = lengths(g, bs, prefix, longest, INDEX_DTYPES[lens], values, skew)
    total = sum(min(s - p, longest) for p, s in map(extent, first.tolist(), seq.tolist()))
    capacity = max(0, total + slack)
    return {
        "prefix_lens": first,
        "seq_lens": seq,
        "out": randint(g, 0, 2**31 - 1, (capacity,)).to(INDEX_DTYPES[out]),
        "indptr": None if indptr is None else randint(g, 0, 2**31 - 1, (bs + 1,)).to(INDEX_DTYPES[indptr]),
    }


_bad = refused(make, bs=3)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *of_dtypes("lens out indptr", "i32 i32 i32", "i64 i64 i64", "i32 i64 i32", "i64 i32 None"),
        Sample("one", {"bs": 1}),
        Sample("no-requests", {"bs": 0}),
        Sample("no-room", {"slack": -10_000}),
        Sample("nothing-at-all", {"bs": 0, "slack": 0, "indptr": None}, control="one"),
        Sample("too-little-room", {"bs": 20, "slack": -30}),
        Sample("exact-room", {"bs": 20, "slack": 0}),
        Sample("much-room", {"bs": 3, "slack": 5000}),
        Sample("past-one-block", {"bs": 1500, "longest": 5}),
        Sample("long-row", {"bs": 3, "longest": 9000}),
        Sample("skewed", {"bs": 600, "longest": 4000, "skew": True}),
        Sample("negative-lengths", {"bs": 41, "values": "negative"}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 300}),
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300}),
        Sample("extreme-i32", {"bs": 41, "values": "extreme", "lens": "i32", "slack": 300}),
    ),
    errors=(
        _bad("out-float", out=lambda: _host.zeros(9)),
        _bad("out-expanded", out=lambda: _host.zeros(1, dtype=torch.int64).expand(9)),
        _bad("out-strided", out=lambda: _host.zeros(18, dtype=torch.int64)[::2]),
        _bad("lengths-disagree", seq_lens=lambda: _host.ones(4, dtype=torch.int64)),
        _bad("indptr-too-short", indptr=lambda: _host.zeros(3, dtype=torch.int32)),
        _bad("indptr-float", indptr=lambda: _host.zeros(4)),
    ),
    ragged={
        "bs": (0, 300),
        "prefix": (0, 90),
        "longest": (0, 90),
        "slack": (-50, 50),
        "lens": ("i32", "i64"),
        "out": ("i32", "i64"),
        "indptr": ("i32", "i64", None),
        "values": ("valid", "negative", "edge", "extreme"),
    },
    fresh=Fresh(
        {
            "bs": Wide(REQUESTS, {"longest": (1, 12)}),
            "longest": Wide(TOKENS, {"bs": (8, 12)}),
            "prefix": Wide(ROWS, {"bs": MANY}),
            "slack": Wide(TOKENS),
        },
        lambda p: p["bs"] * p["longest"] + max(p["slack"], 0),
    ),
)
