"""kv_transfer: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.kv.pool import KVPool
from hal.ops._torch import BITS
from hal.ops.kv_transfer import stack_layers
from hal.ops.proofs.fresh import HEADS, MANY, PAGES, PAIRS, SLOTS, Fresh, Wide, room_for
from hal.ops.proofs.inputs import FAR, FLOAT_DTYPES, INDEX_DTYPES, generator, odd_indices, randint, refused
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import Proof, Sample


def _at(half: Tensor, pool: KVPool, layer: int, slot: int) -> Tensor:
    """The row of one token, a view, found by the layout's own index order."""
    page, token = divmod(slot, pool.page_size)
    if pool.layout == "layer_first":
        return half[layer, slot]
    if pool.layout == "page_first":
        return half[slot, layer]
    if pool.layout == "page_first_direct":
        return half[page, layer, token]
    return half[page, :, token, layer]


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    src, dst = a["src"], a["dst"]
    todo = range(src.num_layers) if a["layers"] is None else a["layers"]
    pairs = [
        (s, d)
        for s, d in zip(a["src_slots"].tolist(), a["dst_slots"].tolist(), strict=True)
        if 0 <= s < src.num_slots and 0 <= d < dst.num_slots
    ]
    rounds: list[list[tuple[int, int]]] = []
    seen: dict[int, int] = {}
    for s, d in pairs:
        turn = seen[d] = seen.get(d, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append((s, d))
    halves = {}
    for x in ("k", "v"):
        if getattr(src, x) is None:
            continue
        source, target = stack_layers(getattr(src, x)), stack_layers(getattr(dst, x))
        bits = BITS[target.dtype.itemsize]
        named = _host.zeros(target.shape, dtype=torch.bool)
        value, candidates = _host.zeros(target.shape, dtype=bits), []
        for turn_pairs in rounds:
            value = value.clone()
            for s, d in turn_pairs:
                for layer in todo:
                    row = _at(value, dst, layer, d)
                    row.copy_(_at(source.view(bits), src, layer, s).reshape(row.shape))
                    _at(named, dst, layer, d).fill_(True)
            candidates.append(Candidate(value.view(target.dtype)))
        halves[x] = Want(named, tuple(candidates))
    return {"dst": Want(_host.zeros(0, dtype=torch.bool), fields=halves)}


def make(
    seed: int = 0,
    n: int = 9,
    num_layers: int = 3,
    heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    mla: bool = False,
    dtype: str = "bf16",
    src: str = "layer_first",
    dst: str = "page_first",
    src_page: int = 4,
    dst_page: int = 4,
    src_slots: int = 32,
    dst_slots: int = 48,
    slot: str = "i64",
    layers: tuple[int, int] | None = None,
    method: str = "auto",
    order: str = "random",
    values: str = "valid",
    view: str = "plain",
) -> dict[str, Any]:
    """src, dst: a layout's name, or ``list`` for layer_first as one tensor a layer. order: ``random``, ``runs``
    (consecutive slots), ``pages`` (whole pages in random order). view: ``plain``, ``padded`` (the outer strides are
    odd), ``far`` (dst's tokens 2^29 elements apart). mla: rows without heads, no v.
    """
    g = generator(seed)
    rows = rows_of(heads, head_dim, v_head_dim, mla)
    a = make_pool(g, src, src_slots, src_page, num_layers, rows, dtype, "padded" if view == "padded" else "plain")
    b = make_pool(g, dst, dst_slots, dst_page, num_layers, rows, dtype, view)
    return {
        "src": a,
        "dst": b,
        "src_slots": _slots(g, n, src_slots, src_page, order, values, INDEX_DTYPES[slot]),
        "dst_slots": _slots(
            g, n, dst_slots, dst_page, order, "valid" if values == "skip" else values, INDEX_DTYPES[slot], by=1
        ),
        "layers": None if layers is None else range(*layers),
        "method": method,
    }


def _slots(
    g: torch.Generator, n: int, size: int, page: int, order: str, values: str, dtype: torch.dtype, by: int = 0
) -> Tensor:
    if order == "runs":
        base = _host.arange(size)
    elif order == "pages":
        base = (_host.randperm(size // page, generator=g).unsqueeze(1) * page + _host.arange(page)).view(-1)
    else:
        base = _host.randperm(size, generator=g)
    index = base[:n] if n <= base.numel() else randint(g, 0, size, (n,))
    return odd_indices(index, size, values, dtype, by)


Rows = tuple[tuple[int, ...], tuple[int, ...] | None]
"""The sizes of a token's row of k, and of v where there is one."""


def rows_of(heads: int, head_dim: int, v_head_dim: int | None, mla: bool) -> Rows:
    return ((head_dim,), None) if mla else ((heads, head_dim), (heads, v_head_dim or head_dim))


def make_pool(
    g: torch.Generator, layout: str, slots: int, page: int, n: int, rows: Rows, dtype_name: str, view: str
) -> KVPool:
    (row, v_row), dtype = rows, FLOAT_DTYPES.get(dtype_name) or {"u8": torch.uint8, "i64": torch.int64}[dtype_name]

    def fresh(shape: tuple[int, ...]) -> Tensor:
        raw = _host.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=g).view(
            dtype
        )
        if view == "plain" or 0 in shape:
            return raw
        inner = 1 if layout == "page_head" else len(row)
        st, step = list(raw.stride()), raw.stride()[-inner] * shape[-inner]
        for i in range(len(shape) - inner - 1, -1, -1):
            st[i] = step = step + 16 if view == "padded" else step
            step *= shape[i]
        if view == "far":
            st[0 if layout != "layer_first" else 1] = FAR
            if layout == "layer_first":
                st[0] = st[1] * shape[1]
        bits = BITS[dtype.itemsize]
        out = _host.empty_strided(shape, tuple(st), dtype=bits)
        return out.copy_(raw.view(bits)).view(dtype)

    def half(r: tuple[int, ...]) -> Tensor | list[Tensor]:
        if layout == "list":
            return [fresh((slots, *r)) for _ in range(n)]
        pages = slots // page
        if layout == "page_head":
            h, d = (1, *r)[-2:]
            return fresh((pages, h, page, n, d))
        return fresh({"layer_first": (n, slots, *r), "page_first": (slots, n, *r)}.get(layout) or (pages, n, page, *r))

    name = "layer_first" if layout == "list" else layout
    return KVPool(half(row), None if v_row is None else half(v_row), layout=name, page_size=page)


_bad = refused(make, n=3)


def _other(**change: Any) -> KVPool:
    return make(n=3, **change)["dst"]  # type: ignore[no-any-return]


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def layout_tag(*layouts: str) -> str:
    return "feature:page_head" if "page_head" in layouts else "required"


FEW = {"num_layers": (1, 2), "heads": 1, "head_dim": 8}


def row_size(p: Mapping[str, Any]) -> int:
    """Elements of a token's row in one layer, of k and v."""
    return int(p["head_dim"] * (1 if p["mla"] else 2 * p["heads"]))


def held(p: Mapping[str, Any]) -> int:
    """Bytes of both pools, of what dst must be, and of which elements of it are named."""
    values = FLOAT_DTYPES[p["dtype"]].itemsize * (p["src_slots"] + 2 * p["dst_slots"])
    return int(p["num_layers"] * row_size(p) * (values + p["dst_slots"]))


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{a}-to-{b}", {"src": a, "dst": b}, layout_tag(a, b)) for a in LAYOUTS for b in LAYOUTS),
        *(
            Sample(f"mla-{a}-to-{b}", {"src": a, "dst": b, "mla": True, "head_dim": 576, "n": 5}, layout_tag(a, b))
            for a in LAYOUTS
            for b in LAYOUTS
        ),
        *(Sample(f"list-to-{b}", {"src": "list", "dst": b}, layout_tag(b)) for b in LAYOUTS),
        *(Sample(f"{a}-to-list", {"src": a, "dst": "list"}, layout_tag(a)) for a in LAYOUTS),
        *(Sample(f"{d}", {"dtype": d}) for d in ("fp16", "fp32", "e4m3", "e5m2", "u8", "i64")),
        *(Sample(f"runs-page-{p}", {"src_page": p, "dst_page": p, "order": "runs", "n": 30}) for p in (1, 16)),
        *(Sample(f"pages-of-{p}", {"src_page": p, "dst_page": p, "order": "pages", "n": 28}) for p in (4, 16)),
        Sample(
            "page-3-to-page-16", {"src_page": 3, "src_slots": 33, "dst_page": 16, "dst": "page_first_direct", "n": 20}
        ),
        Sample("slots-i32", {"slot": "i32"}),
        Sample("one", {"n": 1}),
        Sample("empty", {"n": 0}, control="one"),
        Sample("all-skipped", {"values": "none"}, control="one"),
        Sample("past-one-block", {"n": 900, "src_slots": 1024, "dst_slots": 1024, "num_layers": 2, "head_dim": 8}),
        Sample("layer-1-of-3", {"layers": (1, 2)}),
        Sample("layers-1-2-of-3", {"layers": (1, 3), "dst": "page_first_direct"}),
        Sample("no-layers", {"layers": (1, 1)}, control="layer-1-of-3"),
        Sample("skip", {"values": "skip", "n": 21}),
        Sample("edge", {"values": "edge", "n": 25}),
        Sample("edge-direct-layout", {"values": "edge", "n": 25, "dst": "page_first_direct", "slot": "i32"}),
        Sample("extreme", {"values": "extreme", "n": 29}),
        Sample("equal-dst-slots", {"values": "equal", "n": 4}),
        Sample("v-head-dim", {"head_dim": 24, "v_head_dim": 16}),
        Sample("odd-rows", {"head_dim": 3, "heads": 1, "dtype": "u8"}),
        Sample("padded", {"view": "padded", "src": "page_first", "dst": "layer_first"}),
        Sample("padded-direct", {"view": "padded", "src": "page_first_direct", "dst": "page_first"}),
        Sample("no-slots", {"dst_slots": 0, "values": "none"}, control="one"),
        # From some size on an implementation may move rows in another way.
        *(
            Sample(
                f"megabytes-{a}-to-{b}",
                {
                    "src": a,
                    "dst": b,
                    "order": "pages",
                    "num_layers": 32,
                    "heads": 8,
                    "head_dim": 128,
                    "n": 80,
                    "src_page": 16,
                    "dst_page": 16,
                    "src_slots": 96,
                    "dst_slots": 96,
                },
                layout_tag(a, b),
            )
            for a, b in (("page_head", "layer_first"), ("layer_first", "page_first"))
        ),
        *(Sample(f"method-{m}", {"method": m, "order": "pages", "n": 24}) for m in ("kernel", "direct")),
        Sample("far-slots", {"view": "far", "dst_slots": 8, "num_layers": 2, "n": 8}, large=True),
    ),
    errors=(
        _bad("src-a-tensor", src=lambda: _host.zeros(3, 32, 2, 16)),
        _bad("dst-none", dst=None),
        _bad("other-layers", dst=lambda: _other(num_layers=2)),
        _bad("other-dtype", dst=lambda: _other(dtype="fp32")),
        _bad("other-row", dst=lambda: _other(head_dim=32)),
        _bad("no-v", dst=lambda: _other(mla=True)),
        _bad("fewer-dst-slots", dst_slots=lambda: _host.zeros(2, dtype=torch.int64)),
        _bad("slots-float", src_slots=lambda: _host.zeros(3)),
        _bad("slots-of-rank-2", dst_slots=lambda: _host.zeros(3, 1, dtype=torch.int64)),
        _bad("layers-a-list", layers=[0, 1]),
        _bad("layers-outside", layers=range(2, 4)),
        _bad("layers-negative", layers=range(-1, 2)),
        _bad("layers-step", layers=range(0, 3, 2)),
        _bad("unknown-method", method="fast"),
    ),
    ragged={
        "n": (0, 60),
        "num_layers": (1, 4),
        "heads": (1, 3),
        "head_dim": [8, 16, 24],
        "src": LAYOUTS,
        "dst": LAYOUTS,
        "src_page": [1, 3, 16],
        "dst_page": [1, 3, 16],
        "src_slots": (48, 48),
        "dst_slots": (96, 96),
        "slot": ["i32", "i64"],
        "dtype": ["bf16", "e4m3", "fp32"],
        "mla": [False, True],
        "order": ("random", "runs", "pages"),
        "values": ("valid", "skip", "edge", "extreme"),
    },
    fresh=Fresh(
        {
            "n": Wide(PAIRS, {**FEW, "src_slots": room_for("n"), "dst_slots": room_for("n")}),
            "src_slots": Wide(SLOTS, {**FEW, "n": MANY, "dst_slots": 4_800}, PAGES),
            "dst_slots": Wide(SLOTS, {**FEW, "n": MANY, "src_slots": 4_800}, PAGES),
            "num_layers": Wide(HEADS),
            "heads": Wide(HEADS),
            "head_dim": Wide([512, 1024]),
        },
        lambda p: p["num_layers"] * (150 * p["n"] + p["heads"] * p["head_dim"] * (p["src_slots"] + p["dst_slots"])),
        {"n": (9, 40), "src": LAYOUTS[:3], "dst": LAYOUTS[:3]},
        held,
    ),
)
