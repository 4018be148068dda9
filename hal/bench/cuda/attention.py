# mypy: disable-error-code="no-untyped-call, unused-ignore"
# torch has untyped functions.
"""The tables of attention over pages: decode and extend beside FlashInfer, FA3 and contiguous SDPA (`pages.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal.bench import OURS, Row
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import table_of, time_row
from hal.bench.cuda.pages import FP8_QUERIES, HEADS, Inputs

DECODE = ((1, 4096, 1.42), (1, 32768, 1.15), (16, 4096, 1.11), (64, 4096, 1.08), (128, 2048, 1.12), (256, 1024, 1.20))
"""(bs, keys each, what of contiguous SDPA's time FA3 takes there: ours must take no more)."""
EXTEND = ((1, 4096, 0), (4, 1024, 4096), (8, 256, 1024))
"""(bs, new tokens each, prefix each)."""
SHORT = ((16, 300, 700), (40, 100, 400), (64, 64, 960), (128, 17, 500), (300, 5, 100), (512, 4, 200))
"""The same, of many requests with few new tokens: chunks beside each other, hits of a prefix cache."""
MANY = ((64, 128), (256, 128), (300, 101), (512, 512), (1024, 256))
"""(bs, keys each): decode of many short requests."""
ONE_LONG = ((1, 8192), (255, 128))
"""Runs of keys: a long request among short ones."""
EVERY = ((32, 128), (32, 512), (32, 1024), (32, 4096))
"""A mixture of them."""
MIXED = (ONE_LONG, ONE_LONG[::-1], ((248, 128), (8, 2048)), ((1, 2000), (400, 100)), EVERY)
"""Keys of requests that differ, as an engine's do: a long one first or last, some, a mixture."""
UNEVEN = ((70, 4096), (80, 3000))
"""(bs, keys each): decode of batches that fill no whole wave of the programs that run at once."""
SPREAD = ((8, 600), (8, 4400), (8, 1500), (8, 3200), (8, 2300), (8, 5000))
"""The same, of requests that differ."""
MIXED_EXTEND = (
    *((4, keys) for keys in (ONE_LONG, ONE_LONG[::-1], ((31, 512), (1, 16384)), EVERY)),
    (16, ((120, 128), (8, 2048))),
    (64, ((1, 8192), (63, 512))),
    (128, ((1, 16384), (31, 256))),
    (256, ((28, 512), (4, 4096))),
)
"""(new tokens each, keys each with them) of such requests."""
FEW = ((1, 4, 4092), (1, 4, 8188), (1, 4, 32764), (1, 16, 8176), (8, 4, 4092), (1, 64, 8128), (1, 256, 7936))
"""The same, of few requests with few tokens behind many: drafts to verify, a turn of a conversation."""
OVER_FP8 = (
    *((HEADS, *case) for case in ((1, 4, 8188), (8, 4, 4092), (32, 4, 4092), (8, 8, 4088), (32, 8, 4088))),
    *(((heads, kv_heads, 128), 8, new, 4096 - new) for heads, kv_heads, new in ((64, 8, 4), (32, 4, 4), (96, 8, 2))),
    *(((16, 8, 256), *case) for case in ((8, 4, 4092), (1, 4096, 0))),
)
"""Heads, then the same, over e4m3."""
FP8_DECODE = ((64, 4096), (256, 1024), (16, 4096), (1, 4096), (1, 1024), (1, 8192), (32, 1024))
"""(bs, keys each)."""
BEYOND = (
    *((HEADS, torch.bfloat16, *case) for case in MANY),
    *((HEADS, torch.bfloat16, *case) for case in UNEVEN),
    *((HEADS, torch.bfloat16, inputs.requests(keys), keys) for keys in (*MIXED, SPREAD)),
    *((HEADS, torch.float8_e4m3fn, *case) for case in FP8_DECODE + MANY + UNEVEN),
    *((HEADS, torch.float8_e4m3fn, inputs.requests(keys), keys) for keys in (*MIXED, SPREAD)),
    (HEADS, torch.float8_e5m2, 64, 4096),
    *(((32, 4, 128), torch.bfloat16, *case) for case in ((64, 4096), (1, 4096), *UNEVEN)),
    ((32, 4, 128), torch.bfloat16, inputs.requests(SPREAD), SPREAD),
    *(((64, 8, 128), torch.bfloat16, *case) for case in ((64, 4096), (1, 4096), *UNEVEN[:1], (40, 3000))),
    ((8, 1, 128), torch.bfloat16, 300, 2000),
    *(((32, 8, 64), torch.bfloat16, *case) for case in ((64, 4096), (110, 3000))),
    *(((16, 8, 256), torch.bfloat16, *case) for case in ((64, 4096), (20, 4096), (16, 4096), (1, 4096), (1, 1024))),
)
"""Heads, the cache's dtype, bs, keys each: decode of short requests, of uneven batches and of requests that differ,
over fp8, with eight query heads a group, and with heads of 64 and 256."""
HOPPER = (
    ((32, 8, 128, 128), *EXTEND, (64, 4, 4092), (1, 64, 0)),
    ((64, 8, 64, 64), *EXTEND[::2]),
    ((16, 8, 256, 256), *EXTEND[::2]),
    ((128, 128, 192, 128), (1, 2048, 0)),
    ((28, 4, 128, 128), EXTEND[1]),
)
"""Query heads, key/value heads, head_dim, v_head_dim; then as EXTEND."""
PROMPTS = (
    ((16, 16, 192, 128), (1, 4096, 0), (1, 16384, 0), (1, 16384, 16384), (4, 1024, 0)),
    ((128, 128, 192, 128), (1, 4096, 0)),
)
"""The same, of DeepSeek's prompts, whose keys were made for the call and lie one behind the other."""


def attention_row(
    op: str,
    bs: int,
    new: int,
    keys: inputs.Keys,
    rounds: int,
    heads: tuple[int, int, int],
    cache: torch.dtype,
    target: float | None = None,
    window: int = -1,
    cap: float = 0.0,
    about: Row | None = None,
) -> Row:
    """Of `rounds` of one batch of `new` tokens each: ours and every peer.

    Args:
        target: of the row's ratio to SDPA; None: it has none.
        about: what else the row says of itself.
    """
    sets = [
        Inputs(bs, new, keys, seed=s, heads=(*heads, heads[2]), cache=cache, window=window, cap=cap) for s in range(2)
    ]
    impls = {OURS: [x.ours() for x in sets]}
    for x in sets:
        for name, fn in x.peers().items():
            impls.setdefault(name, []).append(fn)
    room: dict[str, float] = {}

    def check(name: str, call: Callable[[], Tensor]) -> None:
        if name == FP8_QUERIES:
            sets[0].near(call())
        else:
            room[name] = sets[0].check(call())

    seen = [
        sum(min(n, window + 1 if window >= 0 else n) for n in range(last - new + 1, last + 1)) for last in sets[0].lens
    ]
    read = [min(n, window + new) if window >= 0 else n for n in sets[0].lens]
    listed, work = sum(read), sum(seen)
    per_graph = max(2, min(48, int(2e5 / max(1.0, listed / 200 + work / 1e4))))
    row = time_row(
        {
            "op": op,
            "heads": "/".join(map(str, heads)),
            "cache": str(cache).removeprefix("torch."),
            "bs": bs,
            "new": new,
            "keys": inputs.told(keys),
            **({"window": window} if window >= 0 else {}),
            **({"cap": cap} if cap else {}),
            **(about or {}),
        },
        {n: partial(_in_turn, fns) for n, fns in impls.items()},
        len(sets),
        check,
        per_graph=per_graph,
        rounds=rounds,
        host=300 if listed <= 1 << 16 else 0,
        host_of=(OURS,),
    )
    row["headroom"] = room
    if us := row.get("device_us", {}).get(OURS):
        q_heads, kv_heads, dim = heads
        row["ratio"] = {n: us / t for n, t in row["device_us"].items() if n != OURS}
        row["gbs"] = 2 * listed * kv_heads * dim * cache.itemsize / us / 1e3
        row["tflops"] = 4 * work * q_heads * dim / us / 1e6
    return row if target is None else {**row, "target": target}


def _in_turn(fns: list[Callable[[], Tensor]]) -> Callable[[int], Tensor]:
    return lambda i: fns[i]()


def _attention_rows(op: str, rounds: int, cases: list[tuple[Any, ...]]) -> list[Row]:
    """Rows of cases: heads, the cache's dtype, bs, new tokens each, keys each, target."""
    return table_of(
        partial(attention_row, op=op, bs=bs, new=new, keys=keys, rounds=rounds, target=target, heads=heads, cache=cache)
        for heads, cache, bs, new, keys, target in cases
    )


def decode_attention(quick: bool = False) -> list[Row]:
    """Rows: batch; `target` is the ratio to SDPA that FA3 has. Then `BEYOND`."""
    some: list[tuple[Any, ...]] = [(HEADS, torch.bfloat16, *case) for case in (DECODE[::5] if quick else DECODE)]
    some += [] if quick else [(*case, None) for case in BEYOND]
    cases = [(heads, cache, bs, 1, keys, target) for heads, cache, bs, keys, target in some]
    return _attention_rows("decode_attention", 3 if quick else 25, cases)


def extend_attention(quick: bool = False) -> list[Row]:
    """Rows: batch; then `OVER_FP8`, and `MIXED_EXTEND` over either."""
    bf16 = EXTEND[-1:] if quick else EXTEND + SHORT + FEW
    some: list[tuple[Any, ...]] = [(HEADS, torch.bfloat16, *case) for case in bf16]
    some += [] if quick else [(heads, torch.float8_e4m3fn, *case) for heads, *case in OVER_FP8]
    cases: list[tuple[Any, ...]] = [
        (heads, cache, bs, new, new + prefix, None) for heads, cache, bs, new, prefix in some
    ]
    for cache in () if quick else (torch.bfloat16, torch.float8_e4m3fn):
        cases += [(HEADS, cache, inputs.requests(keys), new, keys, None) for new, keys in MIXED_EXTEND]
    return _attention_rows("extend_attention", 3 if quick else 15, cases)


def _hopper_row(
    heads: tuple[int, int, int, int], bs: int, new: int, keys: int, rounds: int, prompt: bool = False
) -> Row:
    x = Inputs(bs, new, keys, heads=heads, in_order=prompt)
    if prompt:
        ours, calls = OURS, {OURS: x.ours(), **x.vllm_fa3_contiguous()}
    else:
        # The kernel for Hopper takes no scale of a cache; the other multiplies by it once a tile of queries.
        ours, calls = "hopper", {"hopper": x.ours(), "triton": x.ours(k_scale=1.0)}
    room: dict[str, float] = {}

    def check(name: str, call: Callable[[], Tensor]) -> None:
        room[name] = x.check(call())

    row = time_row(
        {"op": "extend_attention", "heads": heads, "bs": bs, "new": new, "keys": keys},
        {n: partial(_in_turn, [call]) for n, call in calls.items()},
        1,
        check,
        per_graph=4,
        rounds=rounds,
        host=0,
    )
    row["headroom"] = room
    times = row.get("device_us", {})
    if us := times.get(ours):
        work = 4 * bs * new * (keys - (new - 1) / 2) * heads[0] * (heads[2] + heads[3]) / 2
        row["ratio"] = {n: us / t for n, t in times.items() if n != ours}
        row["tflops"] = work / us / 1e6
    return row


def _hopper_rows(cases: tuple[Any, ...], quick: bool, **more: Any) -> list[Row]:
    flat = [(heads, *case) for heads, *several in cases for case in several]
    return table_of(
        partial(_hopper_row, heads=heads, bs=bs, new=new, keys=new + prefix, rounds=3 if quick else 9, **more)
        for heads, bs, new, prefix in (flat[:1] if quick else flat)
    )


def extend_attention_hopper(quick: bool = False) -> list[Row]:
    """Rows: heads, batch, device microseconds of both kernels of `extend_attention`, in turn in one run; then `PROMPTS`
    beside FA3 over the same keys."""
    return _hopper_rows(HOPPER, quick) + ([] if quick else _hopper_rows(PROMPTS, quick, prompt=True))


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "decode_attention": decode_attention,
    "extend_attention": extend_attention,
    "extend_attention_hopper": extend_attention_hopper,
}
