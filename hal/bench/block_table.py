# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined, assignment"
# Kernels' parameters have no types, and calls are passed on as *args.
"""Block tables: what listing their slots costs, and whether attention had better read them itself.

    python -m hal.bench.block_table expand     build_kv_indices_from_blocks beside its peers
    python -m hal.bench.block_table decode     a step's attention: list once, then by slots, or by block table

Each prints rows as JSON, a line each. Outputs are compared before anything is timed.

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

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import decode_attention as by_slots
from hal.backends.cuda._attention import entry, logits, step, tile
from hal.backends.cuda._split import chunk_of, seek
from hal.backends.cuda.build_kv_indices_from_blocks import build_kv_indices_from_blocks
from hal.bench import cuda
from hal.kv.view import copy_unit
from hal.triton import launch

Row = dict[str, Any]
DEVICE = "cuda"
PAGE = 16
HEADS = (32, 8, 128)
"""Llama-3-8B: query heads, key/value heads, head_dim."""
LAYERS = 32
SIZES = (1, 16, 64, 256)
KEYS = (1024, 2048, 4096, 8192)
POOL = 2048
"""Pages of a layer's cache at least, 128 MiB at these heads."""
CACHED = 1 << 28
"""Bytes of keys and values that the layers of a timed graph read at least: they must not stay in the second cache."""


# --- listing ----------------------------------------------------------------------------------------


@triton.jit
def _plain_kernel(table, lens, indptr, out, stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """A program a request, its keys a block at a time, from sums that others have made: what engines write."""
    i = tl.program_id(0)
    length = tl.load(lens + i)
    to = tl.load(indptr + i)
    for t in range(0, length, BLOCK):
        at = t + tl.arange(0, BLOCK)
        block = tl.load(table + i * stride + at // PAGE, at < length)
        tl.store(out + to + at, block * PAGE + at % PAGE, at < length)


def plain(table: Tensor, lens: Tensor, page: int, indptr: Tensor, out: Tensor) -> Tensor:
    """torch's sum, then a program a request; for int32 throughout."""
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    _plain_kernel[(lens.shape[0],)](table, lens, indptr, out, table.stride(0), PAGE=page, BLOCK=512)
    return out


def torch_operators(table: Tensor, lens: Tensor, page: int, indptr: Tensor, out: Tensor) -> Tensor:
    """Operators that a graph can hold: every place of the buffer looks up its request."""
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    o = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    i = torch.searchsorted(indptr[1:], o, right=True, out_int32=True).clamp_(max=lens.shape[0] - 1)
    t = o - indptr[i]
    torch.add(table[i, t // page] * page, t % page, out=out)
    return out


def expand(
    sizes: Iterable[int] = SIZES, keys: Iterable[int] = KEYS, page: int = PAGE, rounds: int = 25
) -> list[Row]:
    """Rows: bs, keys each at most, device and host microseconds of ours and of what is written instead today."""
    out = []
    for bs in sizes:
        for most in keys:
            columns = -(-most // page)
            sets = []
            for _ in range(4):
                table = torch.randint(0, 1 << 17, (bs, columns), dtype=torch.int32, device=DEVICE)
                lens = torch.randint(most // 2, most + 1, (bs,), dtype=torch.int32, device=DEVICE)
                sums = torch.zeros(bs + 1, dtype=torch.int32, device=DEVICE)
                packed = torch.zeros(int(lens.sum()), dtype=torch.int32, device=DEVICE)
                sets.append((table, lens, page, sums, packed))
            impls: dict[str, Callable[..., Tensor]] = {
                "hal": build_kv_indices_from_blocks,
                "cumsum and a program a request": plain,
                "torch": torch_operators,
            }
            want = _truth(*sets[0])
            for name, fn in impls.items():
                sets[0][3].fill_(-1)[0] = 0
                assert torch.equal(fn(*sets[0]), want), name
                assert int(sets[0][3][-1]) == want.shape[0], name
            calls = {n: (lambda i, fn=fn, sets=sets: fn(*sets[i])) for n, fn in impls.items()}
            times = cuda.device_us(calls, len(sets), 24, rounds)
            out.append({
                "op": "build_kv_indices_from_blocks", "bs": bs, "keys": most, "device_us": times,
                "host_us": cuda.host_us(calls, len(sets), 200),
                "ratio": {n: times["hal"] / us for n, us in times.items() if n != "hal"},
            })  # fmt: skip
    return out


def _truth(table: Tensor, lens: Tensor, page: int, *_: Tensor) -> Tensor:
    slots = (table.unsqueeze(2) * page + torch.arange(page, dtype=torch.int32, device=table.device)).flatten(
        1
    )
    return torch.cat([row[:n] for row, n in zip(slots, lens.tolist(), strict=True)])


# --- decode by block table --------------------------------------------------------------------------


@launch.jit(
    do_not_specialize=(
        "kv_indptr", "table", "part", "part_lse", "q_row", "q_head", "kc_page", "kc_token", "kc_head", "out_row",
        "out_head", "pages", "row", "nnz", "bs", "programs", "scale",
    )
)  # fmt: skip
def decode_by_blocks_kernel(
    q, k_cache, v_cache, kv_indptr, table, out, part, part_lse,
    q_row: tl.int64, q_head: tl.int64, kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64, out_row: tl.int64,
    out_head: tl.int64, pages: tl.int64, row: tl.int64, nnz: tl.int64, bs: tl.int32, programs: tl.int32, scale,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BY_PAGE: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    SHORTEST: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    block = tl.program_id(0) % BLOCKS
    c = tl.program_id(0) // BLOCKS
    if bs <= FEW:
        chunk = chunk_of(kv_indptr, tl.arange(0, FEW), nnz, bs, programs, 0, SHORTEST, False)
        request, before = seek(kv_indptr, tl.arange(0, FEW), c, nnz, bs, chunk, 0, False)
    else:
        chunk = chunk_of(kv_indptr, tl.arange(0, BLOCK), nnz, bs, programs, 0, SHORTEST, False)
        request, before = seek(kv_indptr, tl.arange(0, BLOCK), c, nnz, bs, chunk, 0, False)
    if request < bs:
        begin = entry(kv_indptr, request, nnz)
        length = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
        parts = tl.maximum(length - 1, 0) // chunk + 1
        own = (tl.maximum(length - 1, 0) // parts + N) // N * N
        low = (c - before) * own
        high = tl.minimum(low + own, length)
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
        for j in tl.range(low, high, N, num_stages=STAGES):
            keys = j + tl.arange(0, N)
            if BY_PAGE:
                # `low` and N are multiples of PAGE.
                p = j // PAGE + tl.arange(0, N // PAGE)
                numbers = tl.load(blocks + p, p * PAGE < high, other=-1)
                number = tl.reshape(tl.broadcast_to(numbers[:, None], (N // PAGE, PAGE)), (N,)).to(tl.int64)
            else:
                number = tl.load(blocks + keys // PAGE, keys < high, other=-1).to(tl.int64)
            ok = (number >= 0) & (number < pages) & (keys < high)
            at = number * kc_page + (keys % PAGE) * kc_token
            k = tile(k_base, at, ok, 0, D, D)
            s = logits(q0, q0, k, k, scale, 0.0, False, False)
            s = tl.where(ok[None, :], s, float("-inf"))
            acc, top, total = step(acc, top, total, s, tile(v_base, at, ok, 0, D, D))
        if PDL:
            gdc_launch_dependents()
        some = total != 0.0
        acc = acc * (1.0 / tl.where(some, total, 1.0))[:, None]
        sums = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        d = tl.arange(0, D)[None, :]
        if parts == 1:
            to = out + request.to(tl.int64) * out_row + head[:, None] * out_head + d
            tl.store(to, acc.to(out.dtype.element_ty), there[:, None])
        else:
            line = c.to(tl.int64) * Q_HEADS + head
            tl.store(part + line[:, None] * D + d, acc, there[:, None])
            tl.store(part_lse + line, sums, there)


def decode_by_blocks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, table: Tensor, out: Tensor, *, scale: float,
    nnz: int, by_page: bool,
) -> Tensor:  # fmt: skip
    """`decode_attention` over caches ``[pages, page_size, heads, D]`` that lie alike, D a power of 2."""
    bs, q_heads, dim = q.shape
    run, merge, blocks, programs, _ = by_slots._plan(
        q, k_cache, v_cache, out, None, False, False, None, None, False, False
    )
    kept = run.static
    strides = (*q.stride()[:2], *k_cache.stride()[:3], *out.stride()[:2])
    unit = copy_unit(strides)
    names = ("Q_HEADS", "GROUP", "BLOCKS", "M", "N", "D", "STAGES", "SHORTEST", "BLOCK", "FEW", "PDL")
    mine = decode_by_blocks_kernel.bind(
        PAGE=k_cache.shape[1], BY_PAGE=by_page, UNIT=unit, **{n: kept[n] for n in (*names, "num_warps", "launch_pdl")}
    )  # fmt: skip
    lines = (programs + bs) * q_heads
    scratch = by_slots._workspace(q.get_device(), lines * (dim + 1), q)
    sums = scratch[lines * dim :]
    mine.start(
        ((programs + bs) * blocks, 1, 1), q, k_cache, v_cache, kv_indptr, table, out, scratch, sums,
        *(s // unit for s in strides), k_cache.shape[0], table.stride(0), nnz, bs, programs, float(scale),
    )  # fmt: skip
    merge.start(
        (bs * q_heads, 1, 1), kv_indptr, scratch, sums, out, None, *out.stride()[:2], nnz, bs, programs, 0
    )  # fmt: skip
    return out


def decode(sizes: Iterable[int] = SIZES, keys: Iterable[int] = KEYS, rounds: int = 15) -> list[Row]:
    """Rows: bs, keys each, device microseconds of a layer by each way, of the listing, and of a step of `LAYERS`.

    ``step_us``: what the ways take for all layers of a step; ``ratio``: of the better one by block table to the listing
    and decode by slots. The layers of a timed graph have caches of their own.
    """
    hq, hk, d = HEADS
    rows = []
    for bs in sizes:
        for most in keys:
            columns = -(-most // PAGE)
            pages = max(bs * columns, POOL)
            scale = d**-0.5
            dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
            sets = []
            for _ in range(max(2, min(LAYERS, CACHED // (4 * bs * most * hk * d)))):
                q = torch.randn(bs, hq, d, device=DEVICE, dtype=dtype)
                k, v = (torch.randn(pages, PAGE, hk, d, device=DEVICE, dtype=dtype) for _ in range(2))
                table = torch.randperm(pages, dtype=torch.int32, device=DEVICE)[: bs * columns].view(
                    bs, columns
                )
                lens = torch.full((bs,), most, dtype=torch.int32, device=DEVICE)
                lens[::3] -= min(7, most - 1)
                indptr = torch.zeros(bs + 1, dtype=torch.int32, device=DEVICE)
                slots = torch.zeros(bs * most, dtype=torch.int32, device=DEVICE)
                build_kv_indices_from_blocks(table, lens, PAGE, indptr, slots)
                sets.append((q, k, v, indptr, slots, table, lens, torch.empty_like(q)))

            def list_slots(i: int, sets: Any = sets) -> Any:
                _, _, _, indptr, slots, table, lens, _ = sets[i]
                return build_kv_indices_from_blocks(table, lens, PAGE, indptr, slots)

            def slotwise(i: int, sets: Any = sets, scale: float = scale) -> Tensor:
                q, k, v, indptr, slots, _, _, out = sets[i]
                return by_slots.decode_attention(q, k, v, indptr, slots, out, scale=scale)

            def blockwise(i: int, by_page: bool, sets: Any = sets, scale: float = scale) -> Tensor:
                q, k, v, indptr, slots, table, _, out = sets[i]
                return decode_by_blocks(
                    q, k, v, indptr, table, out, scale=scale, nnz=slots.shape[0], by_page=by_page
                )

            layer = {
                "slots": slotwise,
                "blocks, page": lambda i, fn=blockwise: fn(i, True),
                "blocks, lane": lambda i, fn=blockwise: fn(i, False),
            }
            want = layer["slots"](0).clone()
            for name, fn in layer.items():
                sets[0][-1].fill_(torch.nan)
                torch.testing.assert_close(
                    fn(0), want, rtol=1e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}"
                )
            times = cuda.device_us(
                {"listing": list_slots, **layer}, len(sets), 8 if bs * most > 1 << 17 else 32, rounds
            )
            steps = {n: LAYERS * us for n, us in times.items() if n != "listing"}
            steps["slots"] += times["listing"]
            rows.append({
                "op": "decode_attention by block table", "bs": bs, "keys": most, "device_us": times, "step_us": steps,
                "ratio": min(us for n, us in steps.items() if n != "slots") / steps["slots"],
            })  # fmt: skip
            del sets
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    return rows


TABLES: dict[str, Callable[[], list[Row]]] = {"expand": expand, "decode": decode}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or TABLES:
        for row in TABLES[wanted]():
            print(json.dumps(row), flush=True)
