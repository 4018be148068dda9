# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# Kernels' parameters have no types.
"""The tables of the ops that an engine calls around a batch, beside SGLang's kernels of the same name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal import _host
from hal.bench import OURS, Row, peers
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import Args, Build, op_row, ours, positional, table_of

SIZES = (1, 32, 256, 1024, 4096)
KINDS = ("4 each", "ragged to 64", "one long row")
BLOCK_SIZES = (1, 16, 64, 256)
BLOCK_KEYS = (1024, 2048, 4096, 8192)
PAGE = 16
FREE = 1 << 18
"""Pages that an allocator has."""


# --- get_last_loc, assign_extend_cache_locs ---------------------------------------------------------


def _get_last_loc(op: str, bs: int) -> Row:
    table = inputs.req_to_token()
    rows, width = table.shape
    sets: list[Args] = [
        {
            "req_to_token": table,
            "req_pool_indices": inputs.integers(0, rows, bs),
            "prefix_lens": inputs.integers(1, width + 1, bs),
        }
        for _ in range(16)
    ]
    builds: dict[str, Build] = {OURS: ours(op)}
    if theirs := peers.sglang("ops.memory.common"):
        builds["sglang"] = positional(theirs.get_last_loc_triton)
    return op_row({"op": op, "bs": bs}, sets, builds)


def get_last_loc(quick: bool = False) -> list[Row]:
    """Rows: bs."""
    return table_of(partial(_get_last_loc, op="get_last_loc", bs=bs) for bs in _sizes(quick))


def _assign_extend_cache_locs(op: str, kind: str, bs: int) -> Row:
    table = inputs.req_to_token()
    rows, width = table.shape
    sets: list[Args] = []
    for _ in range(8):
        if kind == "4 each":
            lengths = _host.full((bs,), 4)
        elif kind == "ragged to 64":
            lengths = _host.randint(1, 65, (bs,))
        else:
            lengths = _host.ones(bs, dtype=torch.int64)
            lengths[bs // 2] = width - 192
        start = (_host.rand(bs) * (width - lengths).clamp(min=0)).long()
        sets.append(
            {
                "req_to_token": table,
                "req_pool_indices": inputs.integers(0, rows, bs),
                "start_offsets": start.to(inputs.DEVICE),
                "end_offsets": (start + lengths).to(inputs.DEVICE),
                "out": torch.full((int(lengths.sum()),), -7, dtype=torch.int64, device=inputs.DEVICE),
            }
        )
    builds: dict[str, Build] = {OURS: ours(op)}
    if theirs := peers.sglang("ops.speculative.cache_locs"):

        def sglang(table: Tensor, requests: Tensor, start: Tensor, end: Tensor, out: Tensor) -> None:
            bs = requests.numel()
            theirs.assign_extend_cache_locs[(bs,)](requests, table, start, end, out, table.shape[1], _power_of_2(bs))

        builds["sglang"] = positional(sglang)
    return op_row({"op": op, "kind": kind, "bs": bs}, sets, builds)


def assign_extend_cache_locs(quick: bool = False) -> list[Row]:
    """Rows: how the lengths are, bs."""
    cases = [(kind, bs) for kind in KINDS for bs in _sizes(quick) if kind != "one long row" or bs <= 32]
    return table_of(
        partial(_assign_extend_cache_locs, op="assign_extend_cache_locs", kind=kind, bs=bs) for kind, bs in cases
    )


def _sizes(quick: bool) -> tuple[int, ...]:
    return SIZES[:2] if quick else SIZES


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# --- what surrounds a batch -------------------------------------------------------------------------

AROUND_A_BATCH = (
    "write_req_to_token",
    "compute_positions",
    "build_kv_indices",
    "build_page_table",
    "alloc_extend",
    "alloc_decode",
)


def _batch(op: str, bs: int, table: Tensor) -> Args:
    """Up to 64 new tokens a request (one for alloc_decode), up to 1024 keys for indices and page tables."""
    prefix = inputs.integers(0, 4096, bs)
    seq = prefix + inputs.integers(1, 65, bs)
    zero = torch.zeros_like(prefix)
    flat = torch.zeros(int((seq - prefix).sum()), dtype=torch.int64, device=inputs.DEVICE)
    requests, keys = inputs.slots(bs, table.shape[0]), inputs.integers(1, 1025, bs)
    if op == "compute_positions":
        return {"prefix_lens": prefix, "seq_lens": seq, "out": flat}
    if op == "write_req_to_token":
        return {
            "req_to_token": table,
            "req_pool_indices": requests,
            "start_offsets": zero,
            "end_offsets": seq - prefix,
            "src": torch.randint_like(flat, 1 << 20),
        }
    if op == "build_page_table":
        out = torch.zeros(bs, 1024 // PAGE, dtype=torch.int32, device=inputs.DEVICE)
        return {"req_to_token": table, "req_pool_indices": requests, "kv_lens": keys, "page_size": PAGE, "out": out}
    if op == "build_kv_indices":
        indptr = torch.zeros(bs + 1, dtype=torch.int32, device=inputs.DEVICE)
        indptr[1:] = keys.cumsum(0)
        return {
            "req_to_token": table,
            "req_pool_indices": requests,
            "kv_lens": keys,
            "kv_indptr": indptr,
            "out": torch.zeros(int(keys.sum()), dtype=torch.int32, device=inputs.DEVICE),
        }
    last = inputs.integers(0, 1 << 16, bs) * PAGE + (prefix - 1) % PAGE
    free = inputs.slots(FREE, FREE)
    if op == "alloc_extend":
        return {
            "prefix_lens": prefix,
            "seq_lens": seq,
            "last_loc": last,
            "free_pages": free,
            "page_size": PAGE,
            "out": flat,
        }
    return {"seq_lens": prefix + 1, "last_loc": last, "free_pages": free, "page_size": PAGE, "out": zero}


def _peers(op: str, bs: int, width: int) -> dict[str, Callable[..., None]]:
    """Peer -> its call on the op's arguments. SGLang makes page tables by torch."""
    if op == "build_page_table":
        return {"torch": torch_page_table}
    upper = _power_of_2(bs)
    if op in ("alloc_extend", "alloc_decode") and (allocator := peers.sglang("ops.memory.allocator")):

        def extend(prefix: Tensor, seq: Tensor, last: Tensor, free: Tensor, page: int, out: Tensor) -> None:
            allocator.alloc_extend_kernel[(len(seq),)](prefix, seq, last, free, out, upper, page)

        def decode(seq: Tensor, last: Tensor, free: Tensor, page: int, out: Tensor) -> None:
            allocator.alloc_decode_kernel[(len(seq),)](seq, last, free, out, upper, page)

        return {"sglang": extend if op == "alloc_extend" else decode}
    if op == "write_req_to_token" and (memory := peers.sglang("ops.memory.common")):

        def write(table: Tensor, requests: Tensor, start: Tensor, end: Tensor, values: Tensor) -> None:
            memory.write_req_to_token_pool_triton[(len(requests),)](
                table, requests, start, start, end, end, values, width
            )

        return {"sglang": write}
    if op == "compute_positions" and (position := peers.sglang("ops.attention.position")):

        def positions(prefix: Tensor, seq: Tensor, out: Tensor) -> None:
            starts = torch.empty_like(prefix, dtype=torch.int32)
            position.compute_position_kernel[(prefix.numel(),)](out, starts, prefix, seq - prefix, True)

        return {"sglang": positions}
    if op == "build_kv_indices" and (kv_indices := peers.sglang("ops.attention.kv_indices")):

        def given(table: Tensor, requests: Tensor, keys: Tensor, indptr: Tensor, out: Tensor) -> None:
            kv_indices.create_flashinfer_kv_indices_triton[(len(keys),)](
                table, requests, keys, indptr, None, out, width
            )

        def summed(table: Tensor, requests: Tensor, keys: Tensor, indptr: Tensor, out: Tensor) -> None:
            torch.cumsum(keys, 0, dtype=torch.int32, out=indptr[1:])
            given(table, requests, keys, indptr, out)

        return {"sglang": given, "sglang with cumsum": summed}
    return {}


def torch_page_table(table: Tensor, requests: Tensor, keys: Tensor, page: int, out: Tensor) -> None:
    """As SGLang makes it: every page's first slot, gathered and divided."""
    first = torch.arange(out.shape[1], dtype=torch.int64, device=out.device) * page
    found = table[requests[:, None], first] // page
    out.copy_(torch.where(first < keys[:, None], found, -1))


def _around_a_batch(op: str, bs: int) -> Row:
    table = inputs.req_to_token()
    sets = [_batch(op, bs, table) for _ in range(4)]
    theirs: dict[str, Build] = {name: positional(fn) for name, fn in _peers(op, bs, table.shape[1]).items()}
    if op == "build_kv_indices":
        theirs["hal, kv_indptr given"] = lambda a: ours(op)({**a, "kv_indptr": None, "given_indptr": a["kv_indptr"]})
    return op_row(
        {"op": op, "bs": bs},
        sets,
        {OURS: ours(op), **theirs},
        outputs=() if op == "write_req_to_token" else ("out",),
        per_graph=48 if bs <= 256 else 24,
        host=200,
    )


def around_a_batch(op: str, quick: bool = False) -> list[Row]:
    """Rows: bs.

    SGLang's create_flashinfer_kv_indices is given kv_indptr, which our build_kv_indices makes unless given it too:
    ``with cumsum`` is what SGLang's takes with torch's sum before it, as SGLang does.
    """
    return table_of(partial(_around_a_batch, op=op, bs=bs) for bs in _sizes(quick))


# --- build_kv_indices_from_blocks -------------------------------------------------------------------


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


def _from_blocks(op: str, bs: int, keys: int) -> Row:
    sets: list[Args] = []
    for _ in range(4):
        table = torch.randint(0, 1 << 17, (bs, -(-keys // PAGE)), dtype=torch.int32, device=inputs.DEVICE)
        lens = inputs.integers(keys // 2, keys + 1, bs, torch.int32)
        sets.append(
            {
                "block_table": table,
                "kv_lens": lens,
                "page_size": PAGE,
                "kv_indptr": torch.zeros(bs + 1, dtype=torch.int32, device=inputs.DEVICE),
                "out": torch.full((int(lens.sum()),), -7, dtype=torch.int32, device=inputs.DEVICE),
            }
        )
    builds: dict[str, Build] = {
        OURS: ours(op),
        "cumsum and a program a request": positional(plain),
        "torch": positional(torch_operators),
    }
    row = op_row({"op": op, "bs": bs, "keys": keys}, sets, builds, per_graph=24, host=200)
    if OURS in (times := row.get("device_us", {})):
        row["ratio"] = {n: times[OURS] / us for n, us in times.items() if n != OURS}
    return row


def build_kv_indices_from_blocks(quick: bool = False) -> list[Row]:
    """Rows: bs, keys each at most; of ours and of what is written instead today."""
    cases = [(bs, keys) for bs in BLOCK_SIZES for keys in BLOCK_KEYS]
    return table_of(
        partial(_from_blocks, op="build_kv_indices_from_blocks", bs=bs, keys=keys)
        for bs, keys in (cases[:2] if quick else cases)
    )


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "get_last_loc": get_last_loc,
    "assign_extend_cache_locs": assign_extend_cache_locs,
    **{op: partial(around_a_batch, op) for op in AROUND_A_BATCH},
    "build_kv_indices_from_blocks": build_kv_indices_from_blocks,
}
