"""What the Ascend kernels are, read from their lowered IR: lint, traffic, buffers, and how far they compile.

No device and no time: everything here is counted. ``hal inspect ascend`` prints it, and CI fails on a
row whose ``verdict`` is not ``ok``, or which costs more than the recorded one (`regressions`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UB_LIMIT = 0.85
"""Of the unified buffer: what is left is the compiler's, for what it adds on the device."""

WASTE_LIMIT = 1.15
"""Bytes moved, in units of those that must be."""

COSTS = ("dma_per_token", "bytes_moved", "ub_bits")
"""The figures of a row that a change must not raise."""


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
        same = {
            "src": src,
            "dst": dst,
            "src_page": page,
            "dst_page": page,
            "src_slots": 256,
            "dst_slots": 256,
        }
        rows = {"n": 128, "num_layers": 32, "heads": 8, "head_dim": 128}
        return of(
            "kv_transfer", f"{name}-{src}-{dst}-page{page}", _slots, _transfer, **{**same, **rows, **params}
        )

    for i in ("i32", "i64"):
        yield of(
            "get_last_loc", f"bs256-{i}", _rows, _last_loc, bs=256, requests=256, width=4096, index=i, lens=i
        )
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
        yield of("build_kv_indices", f"bs64-{i}", _capacity, _listed, **lists, out=i, start=i)
        for page in (1, 16, 64, 128):
            kinds = {"table": i, "lens": i, "indptr": i, "out": i, "start": i, "page_size": page}
            rows = {"bs": 64, "blocks": 4096 // page, "longest": 4096}
            yield of(
                "build_kv_indices_from_blocks", f"bs64-{i}-page{page}", _capacity, _blocks, **rows, **kinds
            )
        pages = {"bs": 64, "requests": 64, "width": 4096, "index": i, "lens": i, "out": i}
        for page in (1, 16, 64):
            table = {**pages, "page_size": page, "pages": 4096 // page}
            yield of("build_page_table", f"bs64-{i}-page{page}", _entries, _paged, **table)
        for page in (1, 16, 64, 128):
            kinds = {"lens": i, "last": i, "free": i, "out": i, "page_size": page, "spare": 0}
            yield of("alloc_extend", f"bs64-{i}-page{page}", _capacity, _extended, **long, **kinds)
        # Every program counts the pages that the requests before its own open, half the batch on average: the only
        # other way is a second launch.
        params = {"bs": 256, "longest": 4096, **kinds, "page_size": 16}
        yield of("alloc_decode", f"bs256-{i}", _capacity, _decoded, 2.5, **params)
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
                _written,
                **heads,
                cache="paged",
                page_size=page,
            )
    for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
        mla = {"n": 64, "slots": 256, "lora_dim": 512, "rope_dim": 64, "dtype": dtype, "page_size": page}
        yield of("mla_kv_write", f"deepseek-{dtype}-page{page}", _slots_of_k, _joined, **mla, cache="paged")
        mla |= {"q_heads": 128, "interleaved": True, "cache": "paged"}
        yield of("mla_rope_kv_write", f"deepseek-{dtype}-page{page}", _slots_of_k, _joined, **mla)
        norm = {"n": 160, "slots": 256, "dtype": dtype, "cache": "paged", "page_size": page}
        heads = {"q_heads": 32, "kv_heads": 4, "head_dim": 128}
        yield of(
            "qk_norm_rope_kv_write",
            f"qwen3-30b-a3b-{dtype}-page{page}",
            _slots_of_k,
            _normed,
            **norm,
            **heads,
        )
    heads = {"q_heads": 8, "kv_heads": 8, "head_dim": 2048, "dtype": "fp32", "n": 160, "slots": 160}
    pairs = {**heads, "head_dim": 512, "interleaved": True}
    yield of("qk_norm_rope_kv_write", "largest-fp32", _slots_of_k, _normed, **heads)
    yield of("qk_norm_rope_kv_write", "largest-fp32-interleaved", _slots_of_k, _normed, **pairs)
    narrow = {**pairs, "q_heads": 32, "head_dim": 128, "dtype": "bf16"}
    yield of("qk_norm_rope_kv_write", "llama3-8b-bf16-interleaved", _slots_of_k, _normed, **narrow)
    yield of("qk_norm_rope_kv_write", "largest-fp32-tail", _slots_of_k, _normed, **heads, rotary_dim=64)
    for page, layout in (
        (1, "layer_first"),
        (16, "page_first_direct"),
        (64, "page_head"),
        (128, "page_first"),
    ):
        rows = {"n": 128, "num_layers": 32, "heads": 8, "head_dim": 128, "slots": 256, "room": 8}
        name = f"mha-8x128-{layout}-page{page}"
        yield of("kv_move", name, _slots, _moved, **rows, layout=layout, page=page)
    attend = {"cache": "paged", "slots": 4096, "bs": 8, "longest": 256, "lengths": "full"}
    for name, (q_heads, kv_heads, head_dim) in shapes.items():
        for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
            heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
            yield of(
                "decode_attention",
                f"{name}-{dtype}-page{page}",
                _keys,
                _attended,
                **attend,
                **heads,
                page_size=page,
            )
    heads = {"kv_heads": 1, "dtype": "fp32", "logit_cap": 5.0, "bs": 1, "longest": 16}
    yield of(
        "decode_attention", "largest-fp32", _keys, _attended, **{**attend, **heads}, q_heads=1, head_dim=2048
    )
    # Four query heads of such a width fill a tile, and k is read again for every tile, and as v.
    mla = {**attend, **heads, "q_heads": 16, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared"}
    yield of("decode_attention", "mla-16-heads-bf16", _keys, _attended, 8.0, **{**mla, "dtype": "bf16"})
    # Eight new tokens are 1 to 4 tiles, and each copies the keys that it sees.
    extend = {**attend, "longest": 8, "prefix": 120}
    for name, (q_heads, kv_heads, head_dim) in shapes.items():
        for dtype, page in (("bf16", 16), ("fp16", 1), ("fp32", 128)):
            heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
            yield of(
                "extend_attention", f"{name}-{dtype}-page{page}", _keys, _attended, 3.0, **extend, **heads,
                page_size=page,
            )  # fmt: skip
    # One token a tile, of the widest heads; of MLA a tile for every four heads, and k again as v.
    heads = {
        "kv_heads": 1,
        "dtype": "fp32",
        "logit_cap": 5.0,
        "sliding_window": 8,
        "bs": 1,
        "longest": 4,
        "prefix": 4,
    }
    widest = {**extend, **heads, "q_heads": 1, "head_dim": 2048}
    yield of("extend_attention", "largest-fp32", _keys, _attended, 3.0, **widest)
    narrow = {**extend, **heads, "q_heads": 1, "head_dim": 8}
    yield of("extend_attention", "narrow-fp32", _keys, _attended, **narrow)
    mla = {**extend, **heads, "q_heads": 16, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared"}
    yield of("extend_attention", "mla-16-heads-bf16", _keys, _attended, 8.0, **{**mla, "dtype": "bf16"})
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


def _listed(a: dict[str, Any]) -> int:
    n = int(a["kv_lens"].sum())
    index = _bytes(a["req_pool_indices"], a["kv_lens"], a["kv_start"], a["kv_indptr"])
    return index + n * (4 + int(a["out"].element_size()))


def _blocks(a: dict[str, Any]) -> int:
    n, page = int(a["kv_lens"].sum()), a["page_size"]
    begin, end = a["kv_start"], a["kv_start"] + a["kv_lens"]
    used = int(((end + page - 1) // page - begin // page).where(end > begin, 0).sum())
    index = _bytes(a["kv_lens"], a["kv_start"], a["kv_indptr"])
    return index + used * int(a["block_table"].element_size()) + n * int(a["out"].element_size())


def _paged(a: dict[str, Any]) -> int:
    used = int((-(-a["kv_lens"] // a["page_size"])).clamp(min=0).sum())
    return _bytes(a["req_pool_indices"], a["kv_lens"], a["out"]) + 4 * used


def _extended(a: dict[str, Any]) -> int:
    # Of last_loc only those whose page is open are looked at.
    looked = int((a["prefix_lens"] % a["page_size"] > 0).sum()) * a["last_loc"].element_size()
    return _bytes(a["prefix_lens"], a["seq_lens"], a["free_pages"], a["out"]) + int(looked) + 8


def _decoded(a: dict[str, Any]) -> int:
    looked = int(((a["seq_lens"] - 1) % a["page_size"] > 0).sum()) * a["last_loc"].element_size()
    return _bytes(a["seq_lens"], a["free_pages"], a["out"]) + int(looked) + 8


def _written(a: dict[str, Any]) -> int:
    return 2 * _bytes(a["k"], a["v"]) + _bytes(a["slots"])


def _keys(a: dict[str, Any]) -> int:
    return int(a["kv_indices"].numel())


def _attended(a: dict[str, Any]) -> int:
    cache = a["k_cache"]
    row = cache.shape[-2] * cache.shape[-1] * cache.element_size()
    shared = a["v_cache"].data_ptr() == cache.data_ptr()
    row += 0 if shared else cache.shape[-2] * a["v_cache"].shape[-1] * cache.element_size()
    own = _bytes(a["q"], a["kv_indptr"], a["kv_indices"], a["out"], a["lse"])
    return own + int(row) * int(a["kv_indices"].numel())


def _joined(a: dict[str, Any]) -> int:
    if "q_rope" in a:
        from hal.ops.mla_rope_kv_write import as_rope_kv_write

        return _rope(as_rope_kv_write(a))
    return 2 * _bytes(a["kv_lora"], a["k_rope"]) + _bytes(a["slots"])


def _normed(a: dict[str, Any]) -> int:
    # What rope leaves alone is normed all the same.
    n, angles = a["q"].shape[0], a["cos_sin_cache"]
    rows = 2 * _bytes(a["q"]) + 3 * _bytes(a["k"]) + 2 * _bytes(a["v"]) + _bytes(a["positions"], a["slots"])
    return (
        rows
        + int(n) * int(angles.shape[1]) * int(angles.element_size())
        + _bytes(a["q_weight"], a["k_weight"])
    )


def _moved(a: dict[str, Any]) -> int:
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


def inspect(kernel: str | None = None) -> list[dict[str, Any]]:
    """A row for each kernel and shape. Runs in the lowered lane (``HAL_LANE=lowered``).

    Args:
        kernel: an op's or a kernel's name; None for all.

    Returns:
        Rows with ``op``, ``case``, ``kernel``, ``scalar_gathers``, ``rmw_stores``, ``int64_vectors``,
        ``scalar_accesses``, ``dma_per_token``, ``bytes_moved``, ``bytes_needed``, ``ub_bits`` and
        ``ub_available`` (of the generation where they are tightest), ``targets`` (target -> ``codegen``,
        ``binary`` where CANN is there, or the compiler's reason) and ``verdict`` (``ok`` or what is wrong).

    Raises:
        HalError: another lane, or nothing is called `kernel`.
        ToolchainError: the tools are missing.

    Example:
        >>> inspect("get_last_loc")[0]["verdict"]                  # doctest: +SKIP
        'ok'
    """
    from importlib import import_module

    from hal._errors import HalError
    from hal.lowered import recording, toolchain
    from hal.triton import launch

    toolchain.require()
    if launch.lane() != "lowered":
        raise HalError("hal: inspect ascend: kernels are inspected in the lowered lane; set HAL_LANE=lowered")
    rows: list[dict[str, Any]] = []
    compiled: dict[tuple[str, str], Any] = {}
    for case in cases():
        module = import_module(f"hal.backends.ascend.{case.op}")
        names = {n for n in vars(module) if n.strip("_") == (kernel or "").strip("_")}
        if kernel is not None and case.op != kernel and not names:
            continue
        args = case.make()
        with recording() as launches:
            getattr(module, case.op)(**args)
        rows.append(_row(case, args, launches, compiled))
    if not rows:
        raise HalError(
            f"hal: inspect ascend: no kernel called {kernel!r}; there are {', '.join(sorted({c.op for c in cases()}))}"
        )
    return rows


def _row(
    case: Case, args: dict[str, Any], launches: list[Any], compiled: dict[tuple[str, str], Any]
) -> dict[str, Any]:
    from hal.lowered.compile import TARGETS, compile_for
    from hal.lowered.lint import lint

    forms = {launch.lowered.key: launch.lowered for launch in launches}
    found = [lint(f.ttadapter) for f in forms.values()]
    # The compiler is a process of its own: two at once, and none for a form that another case had.
    todo = [(key, target) for key in forms for target in TARGETS]
    fresh = [k for k in todo if k not in compiled]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda k: compile_for(forms[k[0]].ttadapter, k[1]), fresh)
        compiled.update(zip(fresh, results, strict=True))
    done = [compiled[k] for k in todo]
    traffic = [t for launch in launches for t in launch.traffic.values()]
    copies = sum(t.copies_in + t.copies_out + t.scalar_reads + t.scalar_writes for t in traffic)
    moved = sum(t.bytes_read + t.bytes_written for t in traffic)
    tight = max(done, key=lambda c: c.ub_share)
    targets: dict[str, str] = {}
    for c in done:
        state = c.reason or ("binary" if c.binary else "codegen")
        if targets.get(c.target, "codegen") in ("codegen", "binary"):
            targets[c.target] = state
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "kernel": ", ".join(sorted({f.name for f in forms.values()})),
        "scalar_gathers": sum(x.scalar_gathers for x in found),
        "rmw_stores": sum(x.rmw_stores for x in found),
        "int64_vectors": sum(x.int64_vectors for x in found),
        "scalar_accesses": max((c.scalar_accesses for c in done if "950" not in c.target), default=0),
        "dma_per_token": round(copies / max(1, case.tokens(args)), 2),
        "bytes_moved": moved,
        "bytes_needed": case.needed(args),
        "ub_bits": tight.ub_bits,
        "ub_available": tight.ub_available,
        "targets": targets,
    }
    wrong = [
        f"{row[k]} {k}"
        for k in ("scalar_gathers", "rmw_stores", "int64_vectors", "scalar_accesses")
        if row[k]
    ]
    wrong += [f"{t}: {why}" for t, why in targets.items() if why not in ("codegen", "binary")]
    if tight.ub_share > UB_LIMIT:
        wrong.append(f"UB {tight.ub_share:.0%} of {tight.target}, at most {UB_LIMIT:.0%}")
    if moved > case.waste * row["bytes_needed"]:
        wrong.append(f"{moved} bytes moved where {row['bytes_needed']} are needed")
    row["verdict"] = "; ".join(wrong) or "ok"
    return row


def recorded(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The costs of `rows` by op and case, as the file has them that `regressions` compares with."""
    return {f"{r['op']}/{r['case']}": {c: r[c] for c in COSTS} for r in rows}


def regressions(rows: list[dict[str, Any]], before: dict[str, dict[str, float]]) -> list[str]:
    """What costs more than `before` (of `recorded`) says, and what was recorded and is gone, or is here and was not."""
    now = recorded(rows)
    out = [f"{case}: not inspected any more" for case in before if case not in now]
    out += [f"{case}: not recorded yet" for case in now if case not in before]
    for case in (c for c in now if c in before):
        out += [
            f"{case}: {c} {now[case][c]}, was {before[case][c]}"
            for c in COSTS
            if now[case][c] > before[case][c]
        ]
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """`inspect`'s rows as text."""
    head = (
        "op",
        "case",
        "gather",
        "rmw",
        "i64",
        "scalar",
        "dma/token",
        "bytes x",
        "UB",
        "compiles for",
        "verdict",
    )
    body = []
    for r in rows:
        ok = [t for t, s in r["targets"].items() if s in ("codegen", "binary")]
        body.append(
            (
                r["op"],
                r["case"],
                str(r["scalar_gathers"]),
                str(r["rmw_stores"]),
                str(r["int64_vectors"]),
                str(r["scalar_accesses"]),
                f"{r['dma_per_token']:.2f}",
                f"{r['bytes_moved'] / max(1, r['bytes_needed']):.2f}",
                f"{r['ub_bits'] / max(1, r['ub_available']):.0%}",
                " ".join(ok) or "none",
                r["verdict"],
            )
        )
    width = [max(len(x[i]) for x in (head, *body)) for i in range(len(head))]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(line, width, strict=True)).rstrip() for line in (head, *body)
    )


def main() -> int:
    """``python -m hal.backends.ascend.inspect [KERNEL] [--json] [--against FILE] [--record FILE]``.

    Exit status 1 where a verdict is not ok, or a kernel costs more than FILE says.
    """
    parser = argparse.ArgumentParser(prog="hal inspect ascend", description=inspect.__doc__)
    parser.add_argument("kernel", nargs="?")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="fail where a kernel costs more than recorded"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the costs, for --against")
    given = parser.parse_args()
    os.environ.setdefault("HAL_LANE", "lowered")
    rows = inspect(given.kernel)
    print(json.dumps(rows, indent=1) if given.json else table(rows))
    if given.record:
        given.record.write_text(json.dumps(recorded(rows), indent=1) + "\n")
    worse = regressions(rows, json.loads(given.against.read_text())) if given.against else []
    for line in worse:
        print(f"regressed: {line}")
    return int(bool(worse) or any(r["verdict"] != "ok" for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
