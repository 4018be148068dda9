"""alloc_extend: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.ops._spans import LONGEST, extent
from hal.ops.alloc_extend import largest_page
from hal.ops.proofs.compute_positions import lengths
from hal.ops.proofs.fresh import MANY, REQUESTS, ROWS, TOKENS, Fresh, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, of_dtypes, randint, refused
from hal.ops.proofs.judge import Want, exactly
from hal.ops.spec import Proof, Sample


def slot_in(page: int, position: int, page_size: int, dtype: torch.dtype) -> int:
    """For the oracles: the slot of `position` in `page`, or -1."""
    return page * page_size + position % page_size if 0 <= page <= largest_page(dtype, page_size) else -1


def open_page(last: int, prefix: int, page_size: int) -> int:
    """For the oracles: the page that the token at `prefix` goes on in, or -1."""
    return last // page_size if last >= 0 and last % page_size == (prefix - 1) % page_size else -1


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    page_size, out, free = a["page_size"], a["out"], a["free_pages"].tolist()
    capacity, needed = out.shape[0], 0
    values: list[int] = []
    lists = (a[n].tolist() for n in ("prefix_lens", "seq_lens", "last_loc"))
    for p, s, last in zip(*lists, strict=True):
        prefix, seq = extent(p, s)
        opened = -(-prefix // page_size)
        for position in range(prefix, min(seq, prefix + capacity - len(values))):
            ahead = position // page_size - opened
            if ahead < 0:
                page = open_page(last, prefix, page_size)
            else:
                page = free[needed + ahead] if needed + ahead < len(free) else -1
            values.append(slot_in(page, position, page_size, out.dtype))
        needed += -(-seq // page_size) - opened
    return want_of(values + [-1] * (capacity - len(values)), needed, out)


def want_of(values: list[int], needed: int, out: Tensor) -> dict[str, Want]:
    return {"out": exactly(values, out.dtype), "return": exactly([needed], torch.int64)}


def open_slots(g: torch.Generator, tokens: Tensor, page_size: int, dtype: torch.dtype, kind: str) -> Tensor:
    """The last slot of requests with `tokens` tokens: -1 of none; some odd ones, and some in the wrong place."""
    page = randint(g, 0, 2**31 // page_size - 2 if page_size < 2**29 else 1, tuple(tokens.shape))
    sane = torch.where((tokens > 0) & (tokens <= LONGEST), tokens, 1).to(torch.int64)
    last = torch.where(tokens > 0, page * page_size + (sane - 1) % page_size, -1)
    last = odd_indices(last, 2**31 - 1, kind if kind in ("edge", "extreme") else "valid", dtype)
    if kind in ("edge", "extreme") and last.numel() > 1:
        last[1::5] ^= 1
    return last


def free_list(g: torch.Generator, n: int, kind: str, dtype: torch.dtype, page_size: int) -> Tensor:
    """`n` different pages; with edge or extreme values, some that no slot can be made of."""
    pages = _host.randperm(n, generator=g) % max(1, 2**31 // page_size - 1)
    return odd_indices(pages, 2**31 // page_size, kind if kind in ("edge", "extreme") else "valid", dtype)


def make(
    seed: int = 0,
    bs: int = 5,
    prefix: int = 40,
    longest: int = 40,
    page_size: int = 16,
    slack: int = 3,
    spare: int = 4,
    lens: str = "i64",
    last: str = "i64",
    free: str = "i64",
    out: str = "i64",
    values: str = "valid",
    skew: bool = False,
) -> dict[str, Any]:
    """`slack`: elements of `out` beyond the tokens. `spare`: free pages beyond those needed; negative: too few."""
    g = generator(seed)
    first, seq = lengths(g, bs, prefix, longest, INDEX_DTYPES[lens], values, skew)
    spans = [extent(p, s) for p, s in zip(first.tolist(), seq.tolist(), strict=True)]
    tokens = sum(min(s - p, longest) for p, s in spans)
    needed = sum(min(-(-s // page_size) - -(-p // page_size), longest) for p, s in spans)
    return {
        "prefix_lens": first,
        "seq_lens": seq,
        "last_loc": open_slots(g, first, page_size, INDEX_DTYPES[last], values),
        "free_pages": free_list(g, max(0, needed + spare), values, INDEX_DTYPES[free], page_size),
        "page_size": page_size,
        "out": randint(g, 0, 2**31 - 1, (max(0, tokens + slack),)).to(INDEX_DTYPES[out]),
    }


_bad = refused(make, bs=3)


PAGE_ERRORS = {"page-zero": 0, "page-huge": 2**30 + 1, "page-float": 16.0, "page-true": True}


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *of_dtypes("lens last free out", "i32 i32 i32 i32", "i64 i64 i64 i64", "i32 i64 i32 i64", "i64 i32 i64 i32"),
        *(Sample(f"page-{p}", {"page_size": p, "bs": 20}) for p in (1, 3, 7, 64, 128)),
        Sample("one", {"bs": 1, "prefix": 9}),
        Sample("no-requests", {"bs": 0}),
        Sample("no-new-tokens", {"longest": 0}),
        Sample("no-room", {"slack": -10_000}),
        Sample("too-little-room", {"bs": 20, "slack": -30}),
        Sample("exact-room", {"bs": 20, "slack": 0, "spare": 0}),
        Sample("much-room", {"bs": 3, "slack": 5000}),
        Sample("no-prefix", {"bs": 20, "prefix": 0, "page_size": 5}),
        Sample("too-few-pages", {"bs": 40, "spare": -20, "page_size": 4}),
        Sample("no-pages", {"bs": 20, "spare": -10_000}),
        Sample("past-one-block", {"bs": 1500, "longest": 5, "page_size": 4}),
        Sample("long-row", {"bs": 3, "longest": 9000, "page_size": 3}),
        Sample("skewed", {"bs": 600, "longest": 4000, "skew": True}),
        Sample("huge-page", {"bs": 9, "page_size": 2**30}),
        Sample("huge-page-i32", {"bs": 9, "page_size": 2**30 - 1, "out": "i32"}),
        Sample("negative-lengths", {"bs": 41, "values": "negative", "page_size": 5}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 300, "page_size": 5}),
        Sample("edge-i32", {"bs": 40, "values": "edge", "slack": 300, "out": "i32", "page_size": 3}),
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300, "page_size": 3}),
        Sample("extreme-page-1", {"bs": 41, "values": "extreme", "slack": 300, "page_size": 1, "out": "i32"}),
        Sample(
            "extreme-i32",
            {"bs": 41, "values": "extreme", "lens": "i32", "last": "i32", "free": "i32", "out": "i32", "slack": 300},
        ),
    ),
    errors=(
        *(_bad(name, page_size=value) for name, value in PAGE_ERRORS.items()),
        _bad("out-float", out=lambda: _host.zeros(9)),
        _bad("out-strided", out=lambda: _host.zeros(18, dtype=torch.int64)[::2]),
        _bad("out-expanded", out=lambda: _host.zeros(1, dtype=torch.int64).expand(9)),
        _bad("lengths-disagree", seq_lens=lambda: _host.ones(4, dtype=torch.int64)),
        _bad("free-pages-float", free_pages=lambda: _host.zeros(4)),
        _bad("last-a-list", last_loc=[1, 2, 3]),
    ),
    ragged={
        "bs": (0, 300),
        "prefix": (0, 90),
        "longest": (0, 90),
        "page_size": (1, 70),
        "slack": (-50, 50),
        "spare": (-30, 30),
        "lens": ("i32", "i64"),
        "last": ("i32", "i64"),
        "free": ("i32", "i64"),
        "out": ("i32", "i64"),
        "values": ("valid", "negative", "edge", "extreme"),
    },
    fresh=Fresh(
        {
            "bs": Wide(REQUESTS, {"longest": (1, 12)}),
            "longest": Wide(TOKENS, {"bs": (8, 12), "page_size": (1, 3)}),
            "prefix": Wide(ROWS, {"bs": MANY}),
            "page_size": Wide((257, 1024), {"bs": MANY}),
            "slack": Wide(TOKENS),
            "spare": Wide(TOKENS),
        },
        lambda p: 4 * p["bs"] * p["longest"] + max(p["slack"], 0) + max(p["spare"], 0),
    ),
)
