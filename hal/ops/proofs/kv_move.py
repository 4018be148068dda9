"""kv_move: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal import _host
from hal.ops.kv_transfer import SPEC as TRANSFER
from hal.ops.proofs.fresh import HEADS, MANY, PAGES, PAIRS, SLOTS, Fresh, Wide, room_for
from hal.ops.proofs.inputs import FLOAT_DTYPES, INDEX_DTYPES, generator, odd_indices, refused, some_slots
from hal.ops.proofs.judge import Want
from hal.ops.proofs.kv_transfer import FEW, LAYOUTS, held, layout_tag, make_pool, row_size, rows_of
from hal.ops.spec import ErrorSample, Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    """A transfer from the pool as it was: the truth never looks at what a write has changed."""
    moved = TRANSFER.oracle({**a, "src": a["pool"], "dst": a["pool"]})["dst"]
    return {"pool": moved, "workspace": Want(_host.ones(a["workspace"].shape, dtype=torch.bool), free=True)}


def make(
    seed: int = 0,
    n: int = 9,
    num_layers: int = 3,
    heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    mla: bool = False,
    dtype: str = "bf16",
    layout: str = "layer_first",
    page: int = 4,
    slots: int = 32,
    slot: str = "i64",
    layers: tuple[int, int] | None = None,
    order: str = "cycle",
    values: str = "valid",
    view: str = "plain",
    room: int = 1,
    spare: int = 5,
) -> dict[str, Any]:
    """layout: that of a pool, or ``list`` (one tensor a layer). order: ``cycle`` (each row to the next one's slot),
    ``shift`` (consecutive slots, one up), ``back`` (one down), ``swap`` (pairs), ``random`` (sources and targets
    drawn apart), ``spread`` (one row to many slots). room: layers that the workspace holds; spare: bytes beyond.
    """
    g = generator(seed)
    pool = make_pool(g, layout, slots, page, num_layers, rows_of(heads, head_dim, v_head_dim, mla), dtype, view)
    source = some_slots(g, n, slots)
    if order in ("shift", "back"):
        source = _host.arange(n) % max(1, slots - 1) + (order == "back")
        target = source + (1 if order == "shift" else -1)
    elif order == "swap":
        target = source.clone()
        target[: n // 2], target[n // 2 : n // 2 * 2] = source[n // 2 : n // 2 * 2], source[: n // 2]
    elif order == "random":
        target = some_slots(g, n, slots)
    elif order == "spread":
        target, source = source, source[:1].expand(n)
    else:
        target = source.roll(-1)
    size = n * max(p.row_bytes for p in pool.planes()) * room + spare
    index = INDEX_DTYPES[slot]
    return {
        "pool": pool,
        "src_slots": odd_indices(source, slots, "valid" if values == "equal" else values, index),
        # One place on: an odd slot must meet a valid one, or either alone decides.
        "dst_slots": odd_indices(target, slots, "valid" if values == "skip" else values, index, by=1),
        "workspace": _host.randint(0, 256, (size,), dtype=torch.uint8, generator=g),
        "layers": None if layers is None else range(*layers),
    }


_bad = refused(make, n=3)


_ORDERS = ("cycle", "shift", "back", "swap", "random", "spread")


def _held(p: Mapping[str, Any]) -> int:
    """That of a transfer into the pool; and the workspace, of k's rows or v's, with a bool for each byte."""
    workspace = FLOAT_DTYPES[p["dtype"]].itemsize * row_size(p) * p["n"] * p["room"]
    return int(held({**p, "src_slots": 0, "dst_slots": p["slots"]}) + workspace)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{layout}", {"layout": layout}, layout_tag(layout)) for layout in (*LAYOUTS, "list")),
        *(
            Sample(f"mla-{layout}", {"layout": layout, "mla": True, "head_dim": 576, "n": 5}, layout_tag(layout))
            for layout in (*LAYOUTS, "list")
        ),
        *(
            Sample(f"{order}-{layout}", {"order": order, "layout": layout, "n": 24}, layout_tag(layout))
            for order in _ORDERS
            for layout in LAYOUTS
        ),
        *(Sample(f"{d}", {"dtype": d}) for d in ("fp16", "fp32", "e4m3", "e5m2", "u8", "i64")),
        *(Sample(f"room-for-{r}", {"room": r, "num_layers": 4, "spare": 0}) for r in (1, 2, 3, 4, 8, 9)),
        *(Sample(f"page-{p}", {"page": p, "slots": 48, "layout": "page_first_direct", "n": 40}) for p in (1, 3, 16)),
        Sample("slots-i32", {"slot": "i32"}),
        Sample("one", {"n": 1, "order": "shift"}),
        Sample("empty", {"n": 0}, control="one"),
        Sample("all-skipped", {"values": "none"}, control="one"),
        Sample("past-one-block", {"n": 1000, "slots": 1024, "num_layers": 2, "head_dim": 8, "room": 2}),
        Sample("shift-past-one-block", {"n": 1000, "slots": 1024, "num_layers": 2, "head_dim": 8, "order": "shift"}),
        Sample("layer-1-of-3", {"layers": (1, 2)}),
        Sample("layers-1-2-of-3", {"layers": (1, 3), "layout": "page_first_direct"}),
        Sample("no-layers", {"layers": (1, 1)}, control="layer-1-of-3"),
        Sample("skip", {"values": "skip", "n": 21}),
        Sample("edge", {"values": "edge", "n": 25}),
        Sample("edge-i32", {"values": "edge", "n": 25, "slot": "i32", "layout": "page_first_direct"}),
        Sample("extreme", {"values": "extreme", "n": 29}),
        Sample("extreme-i32", {"values": "extreme", "n": 29, "slot": "i32"}),
        Sample("equal-dst-slots", {"values": "equal", "n": 4, "order": "back"}),
        Sample("v-head-dim", {"head_dim": 24, "v_head_dim": 16, "room": 2}),
        Sample("v-wider-than-k", {"head_dim": 16, "v_head_dim": 24}),
        Sample("odd-rows", {"head_dim": 3, "heads": 1, "dtype": "u8"}),
        Sample("padded", {"view": "padded", "layout": "page_first"}),
        Sample("padded-direct", {"view": "padded", "layout": "page_first_direct"}),
        Sample("no-slots", {"slots": 0, "values": "none"}, control="one"),
        Sample("far-slots", {"view": "far", "slots": 8, "num_layers": 2, "n": 8, "layout": "page_first"}, large=True),
    ),
    errors=(
        _bad("pool-a-tensor", pool=lambda: _host.zeros(3, 32, 2, 16)),
        _bad("fewer-dst-slots", dst_slots=lambda: _host.zeros(2, dtype=torch.int64)),
        _bad("slots-float", src_slots=lambda: _host.zeros(3)),
        _bad("slots-of-rank-2", dst_slots=lambda: _host.zeros(3, 1, dtype=torch.int64)),
        _bad("no-workspace", workspace=None),
        _bad("workspace-of-floats", workspace=lambda: _host.zeros(4096)),
        ErrorSample("workspace-too-small", "workspace", lambda: make(n=3, spare=-1)),
        ErrorSample(
            "workspace-without-room-for-v", "workspace", lambda: {**make(n=3), "pool": make(n=3, v_head_dim=32)["pool"]}
        ),
        _bad("layers-a-list", layers=[0, 1]),
        _bad("layers-outside", layers=range(2, 4)),
        _bad("layers-step", layers=range(0, 3, 2)),
    ),
    ragged={
        "n": (0, 60),
        "num_layers": (1, 4),
        "heads": (1, 3),
        "head_dim": [8, 16, 24],
        "layout": LAYOUTS,
        "page": [1, 3, 16],
        "slots": (96, 96),
        "slot": ["i32", "i64"],
        "dtype": ["bf16", "e4m3", "fp32"],
        "mla": [False, True],
        "order": _ORDERS,
        "values": ("valid", "skip", "edge", "extreme"),
        "room": [1, 2, 9],
    },
    fresh=Fresh(
        {
            "n": Wide(PAIRS, {**FEW, "slots": room_for("n")}),
            "slots": Wide(SLOTS, {**FEW, "n": MANY}, PAGES),
            "num_layers": Wide(HEADS),
            "heads": Wide(HEADS),
            "head_dim": Wide([512, 1024]),
            "room": Wide([64]),
        },
        lambda p: p["num_layers"] * (150 * p["n"] + p["heads"] * p["head_dim"] * p["slots"]),
        {"n": (9, 40), "layout": LAYOUTS[:3]},
        _held,
    ),
)
