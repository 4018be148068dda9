# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined, assignment"
# Kernels' parameters have no types.
"""A step's attention by block tables: list their slots once and read by slots, or read the table in the kernel.

The decode kernel here is `hal.backends.cuda.decode_attention`'s but for how it finds its keys: a page's number is read
once for all its keys (``page``), or by each key's lane, which the first cache answers (``lane``). What was expected
before it was measured, at Llama-3-8B's heads (32/8/128), pages of 16: by slots, a program reads 4 bytes of index for
512 bytes of key and value (a head's), all heads of a request the same from the second cache; by blocks a quarter of a
byte. So the kernels differ by less than 1 % where the memory's speed bounds them (bs 64 and 256), and by at most 2 %
at bs 1, where the way to the first key is one dependent load in both. Listing costs 1.3 us (bs 1) to 5 us (bs 256,
8k) a step, once for all layers, of which Llama-3-8B has 32: 0.02 % of their time at bs 256, 0.5 % at bs 1 and 1k. So a
second kernel by block table, to be proven and tuned beside the first, would win less than 1 % of attention's time, and
`build_kv_indices_from_blocks` is what engines with block tables get. A ratio below 0.97 would refute that.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._attend import leave
from hal.backends.cuda._attention import logits, step, tile
from hal.backends.cuda._split import find, keys_of, note
from hal.bench import Row, launcher
from hal.bench.cuda import inputs
from hal.bench.cuda.bookkeeping import BLOCK_KEYS, BLOCK_SIZES
from hal.bench.cuda.harness import record_launches, table_of, time_row
from hal.bench.cuda.pages import HEADS, PAGE
from hal.triton import launch

LAYERS = 32
PAGES = 2048
"""Of a layer's cache at least, 128 MiB at these heads."""
CACHED = 1 << 28
"""Bytes of keys and values that the layers of a timed graph read at least: they must not stay in the second cache."""


@triton.jit
def _pages(blocks, j, high, N: tl.constexpr, PAGE: tl.constexpr, BY_PAGE: tl.constexpr):
    """The pages of keys [j, j + N), or of each of them; -1 from `high` on."""
    if BY_PAGE:  # `j` and N are multiples of PAGE
        p = j // PAGE + tl.arange(0, N // PAGE)
        return tl.load(blocks + p, p * PAGE < high, other=-1)
    else:
        keys = j + tl.arange(0, N)
        return tl.load(blocks + keys // PAGE, keys < high, other=-1)


@launch.jit(
    do_not_specialize="""
    kv_indptr table counters part_lse q_row q_head kc_page kc_token kc_head out_row out_head pages row nnz bs programs
    scale
    """.split()
)
def decode_by_blocks_kernel(
    q, k_cache, v_cache, kv_indptr, table, out, counters, part, part_lse,
    q_row: tl.int64, q_head: tl.int64, kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64, out_row: tl.int64,
    out_head: tl.int64, pages: tl.int64, row: tl.int64, nnz: tl.int64, bs: tl.int32, programs: tl.int32, scale,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BY_PAGE: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    block = tl.program_id(0) % BLOCKS
    c = tl.program_id(0) // BLOCKS
    if bs <= FEW:
        chunk, request, before, c = find(
            kv_indptr, tl.arange(0, FEW), c, nnz, bs, programs, 0, SHORTEST, FEW_PARTS, False
        )
    else:
        chunk, request, before, c = find(
            kv_indptr, tl.arange(0, BLOCK), c, nnz, bs, programs, 0, SHORTEST, FEW_PARTS, False
        )
    if request < bs:
        _, parts, low, high = keys_of(kv_indptr, request, c, before, nnz, chunk, 0, N, False)
        if TOGETHER == 0:
            note(part_lse, request, c, before, parts, bs, programs, Q_HEADS)
        kv_head = (block // (BLOCKS * GROUP // Q_HEADS)).to(tl.int64)
        member = block % (BLOCKS * GROUP // Q_HEADS) * M + tl.arange(0, M)
        there = member < GROUP
        head = kv_head * GROUP + member
        q0 = tile(q, request.to(tl.int64) * q_row + head * q_head, there, 0, D, D)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        k_base = k_cache + kv_head * kc_head
        v_base = v_cache + kv_head * kc_head
        blocks = table + request.to(tl.int64) * row
        coming = _pages(blocks, low, high, N, PAGE, BY_PAGE)
        for j in tl.range(low, high, N, num_stages=STAGES):
            numbers = coming
            coming = _pages(blocks, j + N, high, N, PAGE, BY_PAGE)
            if BY_PAGE:
                numbers = tl.reshape(tl.broadcast_to(numbers[:, None], (N // PAGE, PAGE)), (N,))
            number = numbers.to(tl.int64)
            keys = j + tl.arange(0, N)
            ok = (number >= 0) & (number < pages) & (keys < high)
            at = number * kc_page + (keys % PAGE) * kc_token
            k = tile(k_base, at, ok, 0, D, D)
            s = logits(q0, q0, k, k, scale, 0.0, False, False)
            s = tl.where(ok[None, :], s, float("-inf"))
            acc, top, total = step(acc, top, total, s, tile(v_base, at, ok, 0, D, D))
        if PDL:
            gdc_launch_dependents()
        leave(
            acc, top, total, 1.0, out, None, counters, part, part_lse, c, before, request, parts, block, kv_head,
            out_row, out_head, Q_HEADS, GROUP, BLOCKS, M, D, D, False, 0, HEADS, ROWS, TOGETHER,
        )  # fmt: skip


def decode_by_blocks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    slots: Tensor,
    table: Tensor,
    out: Tensor,
    *,
    scale: float,
    by_page: bool,
) -> Callable[[], Tensor]:
    """A call of the kernel above in place of decode_attention's, whose tiles, scratch and merge it has.

    Caches are ``[pages, page_size, heads, D]``, lie alike, and D is a power of 2.
    """
    usual = partial(launcher("cuda", "decode_attention"), q, k_cache, v_cache, kv_indptr, slots, out, scale=scale)
    run, *merges = record_launches(usual)
    names = {p.name for p in decode_by_blocks_kernel.params if p.constexpr} | {"num_warps", "launch_pdl"}
    static = {n: value for n, value in run.static.items() if n in names}
    mine = decode_by_blocks_kernel.bind(**static, PAGE=k_cache.shape[1], BY_PAGE=by_page)
    strides = (s // static["UNIT"] for s in k_cache.stride()[:3])
    given = {
        **run.named,
        **dict(zip(("kc_page", "kc_token", "kc_head"), strides, strict=True)),
        "table": table,
        "pages": k_cache.shape[0],
        "row": table.stride(0),
    }
    args, merged = [given[p.name] for p in mine.args], [(merge.bind(), merge) for merge in merges]

    def call() -> Tensor:
        mine.start(run.grid, *args)
        for bound, merge in merged:
            bound.start(merge.grid, *merge.args)
        return out

    return call


class Layers:
    """A step's batch and its layers, each with a cache of its own; ``keys`` a request, a few less of every third."""

    def __init__(self, bs: int, keys: int) -> None:
        hq, hk, d = HEADS
        self.bs, self.scale = bs, d**-0.5
        columns = -(-keys // PAGE)
        pages = max(bs * columns, PAGES)
        dtype = torch.bfloat16 if inputs.DEVICE == "cuda" else torch.float32
        self.lens = torch.full((bs,), keys, dtype=torch.int32, device=inputs.DEVICE)
        self.lens[::3] -= min(7, keys - 1)
        self.layers = []
        for _ in range(max(2, min(LAYERS, CACHED // (4 * bs * keys * hk * d)))):
            q = torch.randn(bs, hq, d, device=inputs.DEVICE, dtype=dtype)
            k, v = (torch.randn(pages, PAGE, hk, d, device=inputs.DEVICE, dtype=dtype) for _ in range(2))
            table = inputs.slots(bs * columns, pages).int().view(bs, columns)
            indptr = torch.zeros(bs + 1, dtype=torch.int32, device=inputs.DEVICE)
            slots = torch.zeros(bs * keys, dtype=torch.int32, device=inputs.DEVICE)
            self.layers.append((q, k, v, indptr, slots, table, torch.empty_like(q)))
        for i in range(len(self.layers)):
            self.list_slots(i)

    def list_slots(self, i: int) -> Tensor:
        _, _, _, indptr, slots, table, _ = self.layers[i]
        found: Tensor = launcher("cuda", "build_kv_indices_from_blocks")(table, self.lens, PAGE, indptr, slots)
        return found

    def by_slots(self, i: int) -> Tensor:
        q, k, v, indptr, slots, _, out = self.layers[i]
        found: Tensor = launcher("cuda", "decode_attention")(q, k, v, indptr, slots, out, scale=self.scale)
        return found

    def by_blocks(self, by_page: bool) -> Callable[[int], Tensor]:
        calls = [decode_by_blocks(*layer, scale=self.scale, by_page=by_page) for layer in self.layers]
        return lambda i: calls[i]()


def _decode(op: str, bs: int, keys: int, rounds: int) -> Row:
    x = Layers(bs, keys)
    impls: dict[str, Callable[[], Callable[[int], Tensor]]] = {
        "listing": lambda: x.list_slots,
        "slots": lambda: x.by_slots,
        "blocks, page": partial(x.by_blocks, True),
        "blocks, lane": partial(x.by_blocks, False),
    }
    want = x.by_slots(0).clone()

    def check(name: str, call: Callable[[], Tensor]) -> None:
        if name == "listing":
            return
        x.layers[0][-1].fill_(torch.nan)
        torch.testing.assert_close(call(), want, rtol=1e-2, atol=1e-2)

    row = time_row(
        {"op": op, "bs": bs, "keys": keys},
        impls,
        len(x.layers),
        check,
        per_graph=8 if bs * keys > 1 << 17 else 32,
        rounds=rounds,
        host=0,
    )
    if "failed" not in row:
        steps = {n: LAYERS * us for n, us in row["device_us"].items() if n != "listing"}
        steps["slots"] += row["device_us"]["listing"]
        row["step_us"] = steps
        row["ratio"] = min(us for n, us in steps.items() if n != "slots") / steps["slots"]
    return row


def decode_by_block_table(quick: bool = False) -> list[Row]:
    """Rows: bs, keys each, device microseconds of a layer by each way, of the listing, and of a step of `LAYERS`.

    ``step_us``: what the ways take for all layers of a step; ``ratio``: of the better one by block table to the listing
    and decode by slots.
    """
    cases = [(bs, keys) for bs in BLOCK_SIZES for keys in BLOCK_KEYS]
    return table_of(
        partial(_decode, op="decode_attention by block table", bs=bs, keys=keys, rounds=3 if quick else 15)
        for bs, keys in (cases[:1] if quick else cases)
    )


TABLES: dict[str, Callable[[bool], list[Row]]] = {"decode_by_block_table": decode_by_block_table}
