"""alloc_decode: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal import _host
from hal.ops._spans import LONGEST
from hal.ops.proofs.alloc_extend import PAGE_ERRORS, free_list, open_page, open_slots, slot_in, want_of
from hal.ops.proofs.fresh import MANY, REQUESTS, ROWS, TOKENS, Fresh, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, of_dtypes, randint, refused
from hal.ops.proofs.judge import Want
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    page_size, out, free = a["page_size"], a["out"], a["free_pages"].tolist()
    values, needed = [], 0
    for seq, last in zip(a["seq_lens"].tolist(), a["last_loc"].tolist(), strict=True):
        page, position = -1, seq - 1
        if 1 <= seq <= LONGEST:
            if position % page_size == 0:
                page = free[needed] if needed < len(free) else -1
                needed += 1
            else:
                page = open_page(last, position, page_size)
        values.append(slot_in(page, position, page_size, out.dtype))
    return want_of(values, needed, out)


def make(
    seed: int = 0,
    bs: int = 9,
    longest: int = 60,
    page_size: int = 4,
    spare: int = 4,
    lens: str = "i64",
    last: str = "i64",
    free: str = "i64",
    out: str = "i64",
    values: str = "valid",
    opening: str = "some",
) -> dict[str, Any]:
    """`spare`: free pages beyond those needed; negative: too few. `opening`: ``some``, ``all``, ``none``."""
    g = generator(seed)
    tokens = randint(g, 0, longest + 1, (bs,))
    if opening == "all":
        tokens = tokens // page_size * page_size
    elif opening == "none":
        tokens = tokens // page_size * page_size + 1
    seq = odd_indices(tokens + 1, longest, values, INDEX_DTYPES[lens])
    needed = sum(1 <= s <= LONGEST and (s - 1) % page_size == 0 for s in seq.tolist())
    return {
        "seq_lens": seq,
        "last_loc": open_slots(g, tokens, page_size, INDEX_DTYPES[last], values),
        "free_pages": free_list(g, max(0, needed + spare), values, INDEX_DTYPES[free], page_size),
        "page_size": page_size,
        "out": randint(g, 0, 2**31 - 1, (bs,)).to(INDEX_DTYPES[out]),
    }


_bad = refused(make, bs=3)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *of_dtypes("lens last free out", "i32 i32 i32 i32", "i64 i64 i64 i64", "i32 i64 i32 i64", "i64 i32 i64 i32"),
        *(Sample(f"page-{p}", {"page_size": p, "bs": 60}) for p in (1, 3, 7, 16, 64)),
        Sample("one", {"bs": 1}),
        Sample("empty", {"bs": 0}),
        Sample("all-open-a-page", {"bs": 30, "opening": "all"}),
        Sample("none-opens-a-page", {"bs": 30, "opening": "none", "spare": 0}),
        Sample("too-few-pages", {"bs": 60, "spare": -7}),
        Sample("no-pages", {"bs": 20, "spare": -10_000}),
        Sample("past-one-block", {"bs": 5000, "page_size": 2}),
        Sample("huge-page", {"page_size": 2**30}),
        Sample("skip", {"bs": 40, "values": "skip"}),
        Sample("edge", {"bs": 40, "values": "edge"}),
        Sample("edge-i32", {"bs": 40, "values": "edge", "out": "i32", "page_size": 3}),
        Sample("extreme", {"bs": 81, "values": "extreme", "page_size": 3}),
        Sample("extreme-page-1", {"bs": 81, "values": "extreme", "page_size": 1, "out": "i32"}),
        Sample(
            "extreme-i32", {"bs": 81, "values": "extreme", "lens": "i32", "last": "i32", "free": "i32", "out": "i32"}
        ),
    ),
    errors=(
        *(_bad(name, page_size=value) for name, value in PAGE_ERRORS.items()),
        _bad("out-longer", out=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("out-expanded", out=lambda: _host.zeros(1, dtype=torch.int64).expand(3)),
        _bad("free-pages-of-rank-2", free_pages=lambda: _host.zeros(4, 1, dtype=torch.int64)),
        _bad("lens-strided", seq_lens=lambda: _host.ones(6, dtype=torch.int64)[::2]),
    ),
    ragged={
        "bs": (0, 600),
        "longest": (0, 90),
        "page_size": (1, 70),
        "spare": (-30, 30),
        "lens": ("i32", "i64"),
        "last": ("i32", "i64"),
        "free": ("i32", "i64"),
        "out": ("i32", "i64"),
        "values": ("valid", "skip", "edge", "extreme"),
        "opening": ("some", "all", "none"),
    },
    fresh=Fresh(
        {
            "bs": Wide(REQUESTS),
            "longest": Wide(ROWS, {"bs": MANY}),
            "page_size": Wide((257, 1024), {"bs": MANY}),
            "spare": Wide(TOKENS),
        },
        lambda p: p["bs"] + max(p["spare"], 0),
    ),
)
