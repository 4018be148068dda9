"""The shapes in which `hal inspect ascend` looks at each op, and the least that each could move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WASTE_LIMIT = 1.15
"""Bytes moved, in units of those that must be."""


@dataclass(frozen=True)
class Case:
    """One shape of one op. ``tokens`` divide the transactions; ``needed`` is the least that could be moved."""

    op: str
    name: str
    make: Callable[[], dict[str, Any]]
    tokens: Callable[[dict[str, Any]], int]
    needed: Callable[[dict[str, Any]], int]
    waste: float = WASTE_LIMIT


def cases() -> Iterator[Case]:
    """The shapes that must hold: llama, qwen, smollm and MLA rows; pages of 1 to 128; three dtypes."""
    from hal.ops import get_spec

    def of(op: str, name: str, tokens: Any, needed: Any, waste: Any = WASTE_LIMIT, **params: Any) -> Case:
        return Case(op, name, lambda: get_spec(op).make(**params), tokens, needed, waste)

    def rope(name: str, q_heads: int, kv_heads: int, head_dim: int, **params: Any) -> Case:
        heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return of("rope_kv_write", name, _rows, _rope, **{"n": 64, "slots": 256, **heads, **params})

    def transfer(name: str, src: str, dst: str, page: int, **params: Any) -> Case:
        same = {"src": src, "dst": dst, "src_page": page, "dst_page": page, "src_slots": 256, "dst_slots": 256}
        rows = {"n": 128, "num_layers": 32, "heads": 8, "head_dim": 128}
        return of("kv_transfer", f"{name}-{src}-{dst}-page{page}", _slots, _transfer, **{**same, **rows, **params})

    for i in ("i32", "i64"):
        yield of("get_last_loc", f"bs256-{i}", _rows, _last_loc, bs=256, requests=256, width=4096, index=i, lens=i)
        sizes = {"bs": 64, "requests": 64, "width": 4096, "longest": 512}
        dtypes = {"index": i, "offsets": i, "out": i}
        yield of("assign_extend_cache_locs", f"bs64-{i}", _capacity, _assign, **sizes, **dtypes)
        kinds = {**sizes, "longest": 1024, "index": i, "offsets": i, "src": i}
        yield of("write_req_to_token", f"bs64-{i}", _source, _write, **kinds)
        # A third of the slots is skipped: where a run ends is seen by reading them one by one, after the copy in.
        yield of("write_req_to_token", f"bs64-{i}-skip", _source, _write, 2.0, **kinds, slots="skip")
        long = {"bs": 64, "longest": 1024}
        yield of("compute_positions", f"bs64-{i}", _capacity, _plain, **long, lens=i, out=i, indptr=i)
        lists = {"bs": 64, "requests": 64, "width": 4096, "longest": 4096, "index": i, "lens": i, "indptr": i}
        yield of("build_kv_indices", f"bs64-{i}", _capacity, _slots_listed, **lists, out=i, start=i)
        for page in (1, 16, 64, 128):
            kinds = {"table": i, "lens": i, "indptr": i, "out": i, "start": i, "page_size": page}
            rows = {"bs": 64, "blocks": 4096 // page, "longest": 4096}
            yield of("build_kv_indices_from_blocks", f"bs64-{i}-page{page}", _capacity, _blocks, **rows, **kinds)
        pages = {"bs": 64, "requests": 64, "width": 4096, "index": i, "lens": i, "out": i}
        for page in (1, 16, 64):
            table = {**pages, "page_size": page, "pages": 4096 // page}
            yield of("build_page_table", f"bs64-{i}-page{page}", _entries, _bytes_of_pages, **table)
        for page in (1, 16, 64, 128):
            kinds = {"lens": i, "last": i, "free": i, "out": i, "page_size": page, "spare": 0}
            yield of("alloc_extend", f"bs64-{i}-page{page}", _capacity, _bytes_of_extend, **long, **kinds)
        # Every program counts the pages that the requests before its own open, half the batch on average: the only
        # other way is a second launch.
        params = {"bs": 256, "longest": 4096, **kinds, "page_size": 16}
        yield of("alloc_decode", f"bs256-{i}", _capacity, _bytes_of_decode, 2.5, **params)
    shapes = {
        "llama3-8b": (32, 8, 128),
        "llama3-70b": (64, 8, 128),
        "llama3-70b-tp8": (8, 1, 128),
        "qwen3-30b-a3b": (32, 4, 128),
        "smollm2": (9, 3, 64),
    }
    for name, shape in shapes.items():
        for dtype, page in (("bf16", 16), ("fp16", 64), ("fp32", 128)):
            yield rope(f"{name}-{dtype}-page{page}", *shape, dtype=dtype, cache="paged", page_size=page)
    for name, (_, kv_heads, head_dim) in {**shapes, "largest": (0, 128, 2048)}.items():
        for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
            heads = {"kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "n": 64, "slots": 256}
            if name == "largest":
                heads["n"] = 2
            yield of(
                "kv_write",
                f"{name}-{dtype}-page{page}",
                _slots_of_k,
                _bytes_of_write,
                **heads,
                cache="paged",
                page_size=page,
            )
    for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
        mla = {"n": 64, "slots": 256, "lora_dim": 512, "rope_dim": 64, "dtype": dtype, "page_size": page}
        yield of("mla_kv_write", f"deepseek-{dtype}-page{page}", _slots_of_k, _bytes_of_mla_write, **mla, cache="paged")
        mla |= {"q_heads": 128, "interleaved": True, "cache": "paged"}
        yield of("mla_rope_kv_write", f"deepseek-{dtype}-page{page}", _slots_of_k, _bytes_of_mla_write, **mla)
        norm = {"n": 160, "slots": 256, "dtype": dtype, "cache": "paged", "page_size": page}
        heads = {"q_heads": 32, "kv_heads": 4, "head_dim": 128}
        yield of(
            "qk_norm_rope_kv_write",
            f"qwen3-30b-a3b-{dtype}-page{page}",
            _slots_of_k,
            _bytes_of_norm_rope,
            **norm,
            **heads,
        )
    heads = {"q_heads": 8, "kv_heads": 8, "head_dim": 2048, "dtype": "fp32", "n": 160, "slots": 160}
    pairs = {**heads, "head_dim": 512, "interleaved": True}
    yield of("qk_norm_rope_kv_write", "largest-fp32", _slots_of_k, _bytes_of_norm_rope, **heads)
    yield of("qk_norm_rope_kv_write", "largest-fp32-interleaved", _slots_of_k, _bytes_of_norm_rope, **pairs)
    narrow = {**pairs, "q_heads": 32, "head_dim": 128, "dtype": "bf16"}
    yield of("qk_norm_rope_kv_write", "llama3-8b-bf16-interleaved", _slots_of_k, _bytes_of_norm_rope, **narrow)
    yield of("qk_norm_rope_kv_write", "largest-fp32-tail", _slots_of_k, _bytes_of_norm_rope, **heads, rotary_dim=64)
    for page, layout in ((1, "layer_first"), (16, "page_first_direct"), (64, "page_head"), (128, "page_first")):
        rows = {"n": 128, "num_layers": 32, "heads": 8, "head_dim": 128, "slots": 256, "room": 8}
        name = f"mha-8x128-{layout}-page{page}"
        yield of("kv_move", name, _slots, _bytes_of_move, **rows, layout=layout, page=page)
    attend = {"cache": "paged", "slots": 4096, "bs": 8, "longest": 256, "lengths": "full"}
    for name, (q_heads, kv_heads, head_dim) in shapes.items():
        for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
            heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
            yield of(
                "decode_attention",
                f"{name}-{dtype}-page{page}",
                _keys,
                _bytes_of_attention,
                **attend,
                **heads,
                page_size=page,
            )
    heads = {"kv_heads": 1, "dtype": "fp32", "logit_cap": 5.0, "bs": 1, "longest": 16}
    yield of(
        "decode_attention", "largest-fp32", _keys, _bytes_of_attention, **{**attend, **heads}, q_heads=1, head_dim=2048
    )
    # Four query heads of such a width fill a tile, and k is read again for every tile, and as v.
    mla = {**attend, **heads, "q_heads": 16, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared"}
    yield of("decode_attention", "mla-16-heads-bf16", _keys, _bytes_of_attention, 8.0, **{**mla, "dtype": "bf16"})
    for dtype, page in (("bf16", 16), ("fp32", 128)):
        kind = {"dtype": dtype, "page_size": page, "logit_cap": 0.0, "bs": 8, "longest": 256}
        yield of(
            "decode_attention", f"mla-16-heads-{dtype}-page{page}", _keys, _bytes_of_attention, 8.0, **{**mla, **kind}
        )
    # Eight new tokens are 1 to 4 tiles, and each copies the keys that it sees.
    extend = {**attend, "longest": 8, "prefix": 120}
    for name, (q_heads, kv_heads, head_dim) in shapes.items():
        for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
            heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
            yield of(
                "extend_attention",
                f"{name}-{dtype}-page{page}",
                _keys,
                _bytes_of_attention,
                3.0,
                **extend,
                **heads,
                page_size=page,
            )
    # One token a tile, of the widest heads; of MLA a tile for every four heads, and k again as v.
    heads = {"kv_heads": 1, "dtype": "fp32", "logit_cap": 5.0, "sliding_window": 8, "bs": 1, "longest": 4, "prefix": 4}
    widest = {**extend, **heads, "q_heads": 1, "head_dim": 2048}
    yield of("extend_attention", "largest-fp32", _keys, _bytes_of_attention, 3.0, **widest)
    narrow = {**extend, **heads, "q_heads": 1, "head_dim": 8}
    yield of("extend_attention", "narrow-fp32", _keys, _bytes_of_attention, **narrow)
    mla = {**extend, **heads, "q_heads": 16, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared"}
    yield of("extend_attention", "mla-16-heads-bf16", _keys, _bytes_of_attention, 8.0, **{**mla, "dtype": "bf16"})
    for dtype, page in (("bf16", 16), ("fp32", 128)):
        kind = {"dtype": dtype, "page_size": page, "bs": 8, "longest": 8, "prefix": 120}
        kind |= {"logit_cap": 0.0, "sliding_window": -1}
        yield of(
            "extend_attention", f"mla-16-heads-{dtype}-page{page}", _keys, _bytes_of_attention, 8.0, **{**mla, **kind}
        )
    yield rope("llama3-8b-bf16-page1", 32, 8, 128, page_size=1, cache="paged")
    yield rope("llama3-8b-bf16-interleaved", 32, 8, 128, interleaved=True)
    yield rope("partial-rotary-256", 16, 16, 256, rotary_dim=128)
    yield rope("largest-fp32", 128, 128, 2048, dtype="fp32", n=8, slots=16)
    yield rope("largest-fp32-interleaved", 8, 8, 2048, dtype="fp32", n=2, slots=16, interleaved=True)
    for page in (1, 16, 64, 128):
        yield transfer("mha-8x128", "layer_first", "page_first", page)
        yield transfer("mha-8x128", "page_first_direct", "layer_first", page)
    yield transfer("mha-8x128", "layer_first", "page_head", 16, n=64, src_slots=64, dst_slots=64)
    yield transfer("mla-576", "layer_first", "page_first", 1, num_layers=60, head_dim=576, mla=True)


def _source(a: dict[str, Any]) -> int:
    return int(a["src"].numel())


def _entries(a: dict[str, Any]) -> int:
    return int(a["out"].numel())


def _slots_of_k(a: dict[str, Any]) -> int:
    return int(a["slots"].shape[0])


def _rows(a: dict[str, Any]) -> int:
    return int(next(iter(a.values())).shape[0]) if "prefix_lens" not in a else int(a["prefix_lens"].shape[0])


def _slots(a: dict[str, Any]) -> int:
    return int(a["src_slots"].shape[0])


def _capacity(a: dict[str, Any]) -> int:
    return int(a["out"].numel())


def _bytes(*tensors: Any) -> int:
    return sum(int(t.numel() * t.element_size()) for t in tensors if t is not None)


def _last_loc(a: dict[str, Any]) -> int:
    n = a["prefix_lens"].shape[0]
    return _bytes(a["req_pool_indices"], a["prefix_lens"], a["prefix_lens"]) + 4 * int(n)


def _assign(a: dict[str, Any]) -> int:
    return _bytes(a["req_pool_indices"], a["start_offsets"], a["end_offsets"], a["out"]) + 4 * int(
        (a["end_offsets"] - a["start_offsets"]).clamp(min=0).sum()
    )


def _write(a: dict[str, Any]) -> int:
    length = int((a["end_offsets"] - a["start_offsets"]).clamp(min=0).sum())
    written = int((a["src"][:length] >= 0).sum())
    return _plain({k: v for k, v in a.items() if k != "req_to_token"}) + 4 * written


def _plain(a: dict[str, Any]) -> int:
    """Every tensor once, whole."""
    return _bytes(*(t for t in a.values() if hasattr(t, "numel")))


def _slots_listed(a: dict[str, Any]) -> int:
    n = int(a["kv_lens"].sum())
    index = _bytes(a["req_pool_indices"], a["kv_lens"], a["kv_start"], a["kv_indptr"])
    return index + n * (4 + int(a["out"].element_size()))


def _blocks(a: dict[str, Any]) -> int:
    n, page = int(a["kv_lens"].sum()), a["page_size"]
    begin, end = a["kv_start"], a["kv_start"] + a["kv_lens"]
    used = int(((end + page - 1) // page - begin // page).where(end > begin, 0).sum())
    index = _bytes(a["kv_lens"], a["kv_start"], a["kv_indptr"])
    return index + used * int(a["block_table"].element_size()) + n * int(a["out"].element_size())


def _bytes_of_pages(a: dict[str, Any]) -> int:
    used = int((-(-a["kv_lens"] // a["page_size"])).clamp(min=0).sum())
    return _bytes(a["req_pool_indices"], a["kv_lens"], a["out"]) + 4 * used


def _bytes_of_extend(a: dict[str, Any]) -> int:
    # Of last_loc only those whose page is open are looked at.
    looked = int((a["prefix_lens"] % a["page_size"] > 0).sum()) * a["last_loc"].element_size()
    return _bytes(a["prefix_lens"], a["seq_lens"], a["free_pages"], a["out"]) + int(looked) + 8


def _bytes_of_decode(a: dict[str, Any]) -> int:
    looked = int(((a["seq_lens"] - 1) % a["page_size"] > 0).sum()) * a["last_loc"].element_size()
    return _bytes(a["seq_lens"], a["free_pages"], a["out"]) + int(looked) + 8


def _bytes_of_write(a: dict[str, Any]) -> int:
    return 2 * _bytes(a["k"], a["v"]) + _bytes(a["slots"])


def _keys(a: dict[str, Any]) -> int:
    return int(a["kv_indices"].numel())


def _bytes_of_attention(a: dict[str, Any]) -> int:
    cache = a["k_cache"]
    row = cache.shape[-2] * cache.shape[-1] * cache.element_size()
    shared = a["v_cache"].data_ptr() == cache.data_ptr()
    row += 0 if shared else cache.shape[-2] * a["v_cache"].shape[-1] * cache.element_size()
    own = _bytes(a["q"], a["kv_indptr"], a["kv_indices"], a["out"], a["lse"])
    return own + int(row) * int(a["kv_indices"].numel())


def _bytes_of_mla_write(a: dict[str, Any]) -> int:
    if "q_rope" in a:
        from hal.ops.mla_rope_kv_write import as_rope_kv_write

        return _rope(as_rope_kv_write(a))
    return 2 * _bytes(a["kv_lora"], a["k_rope"]) + _bytes(a["slots"])


def _bytes_of_norm_rope(a: dict[str, Any]) -> int:
    # What rope leaves alone is normed all the same.
    n, angles = a["q"].shape[0], a["cos_sin_cache"]
    rows = 2 * _bytes(a["q"]) + 3 * _bytes(a["k"]) + 2 * _bytes(a["v"]) + _bytes(a["positions"], a["slots"])
    return rows + int(n) * int(angles.shape[1]) * int(angles.element_size()) + _bytes(a["q_weight"], a["k_weight"])


def _bytes_of_move(a: dict[str, Any]) -> int:
    pool = a["pool"]
    row = sum(p.row_bytes for p in pool.planes()) * pool.num_layers
    return int(4 * row * a["src_slots"].shape[0]) + 2 * _bytes(a["src_slots"], a["dst_slots"])


def _rope(a: dict[str, Any]) -> int:
    q, k, v = a["q"], a["k"], a["v"]
    rotary = a["cos_sin_cache"].shape[1]
    part = rotary / q.shape[2]
    angles = q.shape[0] * rotary * a["cos_sin_cache"].element_size()
    # q: the rotated part, in and out. k: all of it in and to the cache, the rotated part back.
    rows = 2 * part * _bytes(q) + (2 + part) * _bytes(k) + 2 * _bytes(v)
    return int(rows) + int(angles) + _bytes(a["positions"], a["slots"])


def _transfer(a: dict[str, Any]) -> int:
    src = a["src"]
    row = sum(p.row_bytes for p in src.planes()) * src.num_layers
    return int(2 * row * a["src_slots"].shape[0]) + _bytes(a["src_slots"], a["dst_slots"])
