"""write_req_to_token: notes the slots of new tokens in the table of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.ops._spans import LONGEST, clamped_lengths, spread
from hal.ops._torch import in_range
from hal.ops.assign_extend_cache_locs import FRESH
from hal.ops.assign_extend_cache_locs import SPEC as ASSIGN
from hal.ops.get_last_loc import check_range
from hal.ops.proofs.fresh import REQUESTS, Wide
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, randint
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import INDEX, ErrorSample, OpSpec, Sample, TensorArg


def write_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> None:
    """Unpacks `src` into ``req_to_token[r_i, start_i:end_i]`` of every request: the inverse of
    `assign_extend_cache_locs`.

    ``req_to_token[r_i, start_i + t] = src[sum(len_j for j < i) + t]`` with ``len_i = max(end_i - start_i, 0)``.
    A slot that is -1, negative or more than int32 holds is skipped, as is what lies outside the table or
    past the end of `src`. Where two requests name one element, it becomes either's.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32, written to; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64. Any value is safe.
        start_offsets: ``[bs]`` int32 or int64, the first column of each request. Any value is safe.
        end_offsets: ``[bs]`` int32 or int64, one past its last. Any value is safe.
        src: ``[capacity]`` int32 or int64, the slots, packed.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride.

    Example:
        >>> import torch, hal
        >>> table = torch.zeros(2, 4, dtype=torch.int32)
        >>> hal.write_req_to_token(table, torch.tensor([1, 0]), torch.tensor([1, 0]), torch.tensor([3, 2]),
        ...                        torch.tensor([5, 6, 7, -1]))
        >>> table
        tensor([[7, 0, 0, 0],
                [0, 5, 6, 0]], dtype=torch.int32)

    Source: the contract of SGLang's ``write_req_to_token_pool``, with every index value defined.
    """
    rows, width = req_to_token.shape
    bs, capacity = start_offsets.shape[0], src.shape[0]
    if 0 in (bs, capacity, rows, width):
        return
    start, end = start_offsets.to(torch.int64), end_offsets.to(torch.int64)
    i, t, used = spread(clamped_lengths(start, end, capacity), capacity)
    row, first, slot = req_pool_indices.to(torch.int64)[i], start[i], src.to(torch.int64)
    valid = used & in_range(row, rows) & (first >= -t) & (first < width - t) & (slot >= 0) & (slot <= LONGEST)
    # Compared before it is added, so that the sum can't wrap.
    column = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    # A boolean mask would sync. Instead what is invalid repeats the first valid store, or, with none
    # valid, stores element (0, 0) onto itself.
    pick = torch.where(
        valid, torch.arange(capacity, device=src.device, dtype=torch.int64), valid.to(torch.int8).argmax()
    )
    some = valid.any()
    row, column = torch.where(some, row[pick], 0), torch.where(some, column[pick], 0)
    own = req_to_token[:1, 0]
    req_to_token.index_put_((row, column), torch.where(some, slot[pick].to(torch.int32), own))


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, src = a["req_to_token"], a["src"].tolist()
    rows, width = table.shape
    rounds: list[tuple[list[int], list[int], list[int]]] = []
    named = _host.zeros(table.shape, dtype=torch.bool)
    seen: dict[tuple[int, int], int] = {}
    at = 0
    lists = (a[n].tolist() for n in ("req_pool_indices", "start_offsets", "end_offsets"))
    for r, start, end in zip(*lists, strict=True):
        length = min(max(end - start, 0), len(src) - at)
        for c, slot in zip(range(start, start + length), src[at : at + length], strict=True):
            if 0 <= r < rows and 0 <= c < width and 0 <= slot <= LONGEST:
                turn = seen[r, c] = seen.get((r, c), -1) + 1
                if turn == len(rounds):
                    rounds.append(([], [], []))
                for values, value in zip(rounds[turn], (r, c, slot), strict=True):
                    values.append(value)
        at += length
    candidates, value = [], table
    for row, column, slots in rounds:
        # An element that is not written again keeps its last candidate.
        value = value.clone()
        value[row, column] = _host.tensor(slots, dtype=table.dtype)
        named[row, column] = True
        candidates.append(Candidate(value))
    return {"req_to_token": Want(named, tuple(candidates))}


def _make(seed: int = 0, src: str = "i64", slots: str = "valid", **params: Any) -> dict[str, Any]:
    """Those of `assign_extend_cache_locs`; `slots`: ``valid``, ``skip``, ``extreme``, ``none``."""
    a = ASSIGN.make(seed=seed, out=src, **params)
    out = a.pop("out")
    g = generator(seed + 1)
    locs = randint(g, 0, 2**31 - 1, tuple(out.shape))
    info = torch.iinfo(INDEX_DTYPES[src])
    if slots == "skip":
        locs[::3] = -1
    elif slots == "none":
        locs[:] = -1
    elif slots == "extreme":
        for k, value in enumerate((-1, info.min, info.max, -2)):
            locs[k::7] = value
    return {**a, "src": locs.to(INDEX_DTYPES[src])}


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    for name, low, high in (
        ("req_pool_indices", -1, rows - 1), ("start_offsets", 0, width), ("end_offsets", 0, width),
        ("src", -1, LONGEST),
    ):  # fmt: skip
        check_range("write_req_to_token", name, a[name], low, high)


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=3, requests=4, width=8, longest=4), **change}


SPEC = OpSpec(
    write_req_to_token,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner", mutated=True),
        "req_pool_indices": TensorArg("bs", INDEX),
        "start_offsets": TensorArg("bs", INDEX),
        "end_offsets": TensorArg("bs", INDEX),
        "src": TensorArg("capacity", INDEX),
    },
    oracle=_oracle,
    make=_make,
    check_values=_check_values,
    samples=(
        *(
            Sample(f"{i}-{p}-{o}", {"index": i, "offsets": p, "src": o})
            for i, p, o in (("i32", "i32", "i32"), ("i64", "i64", "i64"), ("i32", "i64", "i32"), ("i64", "i32", "i64"))
        ),
        Sample("one", {"bs": 1, "longest": 9}),
        Sample("no-requests", {"bs": 0}, control="one"),
        Sample("no-slots", {"slack": -10_000}, control="one"),
        Sample("all-skipped", {"slots": "none", "bs": 9}, control="one"),
        Sample("too-few-slots", {"bs": 20, "slack": -30}),
        Sample("exact", {"bs": 20, "slack": 0}),
        Sample("past-one-block", {"bs": 1500, "requests": 1500, "width": 8, "longest": 5}),
        Sample("long-row", {"bs": 3, "requests": 3, "width": 9000, "longest": 9000}),
        Sample("skewed", {"bs": 600, "width": 4000, "longest": 4000, "skew": True}),
        Sample("strided-table", {"view": "strided", "bs": 40}),
        Sample("skip", {"bs": 20, "slots": "skip"}),
        Sample("extreme-slots", {"bs": 20, "slots": "extreme"}),
        Sample("extreme-slots-i32", {"bs": 20, "slots": "extreme", "src": "i32"}),
        Sample("negative-lengths", {"bs": 41, "values": "negative"}),
        Sample("edge", {"bs": 40, "values": "edge", "slack": 300}),
        Sample("extreme", {"bs": 41, "values": "extreme", "slack": 300}),
        Sample("extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "offsets": "i32", "slack": 300}),
        Sample("no-rows", {"requests": 0}, control="one"),
        Sample("no-columns", {"width": 0}, control="one"),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        ErrorSample(
            "table-of-int64", "req_to_token", lambda: _small(req_to_token=_host.zeros(4, 8, dtype=torch.int64)),
        ),
        ErrorSample(
            "table-expanded", "req_to_token",
            lambda: _small(req_to_token=_host.zeros(1, 8, dtype=torch.int32).expand(4, 8))
        ),
        ErrorSample("src-float", "src", lambda: _small(src=_host.zeros(9))),
        ErrorSample("src-strided", "src", lambda: _small(src=_host.zeros(18, dtype=torch.int64)[::2])),
        ErrorSample("lengths-disagree", "end_offsets", lambda: _small(end_offsets=_host.ones(4, dtype=torch.int64))),
    ),
    ragged={
        "bs": (0, 300), "requests": (1, 40), "width": (1, 200), "longest": (0, 200), "slack": (-50, 50),
        "index": ("i32", "i64"), "offsets": ("i32", "i64"), "src": ("i32", "i64"), "view": ("plain", "strided"),
        "values": ("valid", "skip", "negative", "edge", "extreme"), "slots": ("valid", "skip", "extreme"),
    },
    # Few requests share a row: each that does is another candidate.
    fresh=replace(
        FRESH,
        wide={
            **FRESH.wide, "bs": Wide(REQUESTS, {"requests": (30_000, 40_000), "width": (8, 12), "longest": (1, 8)}),
        },
    ),
)  # fmt: skip
