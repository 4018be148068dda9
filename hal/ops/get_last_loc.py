"""get_last_loc: the slot of each request's last cached token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._errors import ArgumentError
from hal.ops._torch import in_range
from hal.ops.proofs.fresh import table_fresh
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, row_view
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import INDEX, ErrorSample, OpSpec, Sample, TensorArg


def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """The slot of the last cached token of each request, or -1 where there is none.

    ``out[i] = req_to_token[req_pool_indices[i], prefix_lens[i] - 1]`` where ``0 < prefix_lens[i] <=
    max_context_len`` and the request is a row of the table, else -1. Paged allocation continues a
    request's open page from it.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64, rows of the table. Any value is safe.
        prefix_lens: ``[bs]`` int32 or int64, cached tokens. Any value is safe.

    Returns:
        ``[bs]``, the dtype and device of `prefix_lens`.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride.

    Example:
        >>> import torch, hal
        >>> req_to_token = torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32)
        >>> hal.get_last_loc(req_to_token, torch.tensor([1, 0]), torch.tensor([2, 0]))
        tensor([ 5, -1])

    Source: the contract of SGLang's function of the same name, with every index value defined.
    """
    rows, width = req_to_token.shape
    if rows == 0 or width == 0:
        return torch.full_like(prefix_lens, -1)
    request = req_pool_indices.to(torch.int64)
    valid = in_range(request, rows) & (prefix_lens > 0) & (prefix_lens <= width)
    # The index is made valid before anything is added to it: int64's smallest - 1 would wrap.
    column = torch.where(valid, prefix_lens.to(torch.int64), 1) - 1
    found = req_to_token[torch.where(valid, request, 0), column]
    return torch.where(valid, found.to(prefix_lens.dtype), -1)


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, requests, lens = a["req_to_token"], a["req_pool_indices"].tolist(), a["prefix_lens"].tolist()
    rows, width = table.shape
    out = [
        int(table[r, p - 1]) if 0 <= r < rows and 0 < p <= width else -1
        for r, p in zip(requests, lens, strict=True)
    ]
    value = _host.tensor(out, dtype=a["prefix_lens"].dtype)
    return {"return": Want(torch.ones_like(value, dtype=torch.bool), (Candidate(value),))}


def _make(
    seed: int = 0,
    bs: int = 5,
    requests: int = 9,
    width: int = 33,
    index: str = "i64",
    lens: str = "i64",
    view: str = "plain",
    values: str = "valid",
) -> dict[str, Any]:
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(
            randint(g, 0, requests, (bs,)), requests, values, INDEX_DTYPES[index]
        ),
        # One place on: an odd length must meet a valid request, or the request alone decides.
        "prefix_lens": odd_indices(
            randint(g, 1, width + 1, (bs,)),
            width + 1,
            "valid" if values == "equal" else values,
            INDEX_DTYPES[lens],
        ).roll(1),
    }


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    for name, low, high in (("req_pool_indices", -1, rows - 1), ("prefix_lens", 0, width)):
        check_range("get_last_loc", name, a[name], low, high)


def check_range(op: str, name: str, index: Tensor, low: int, high: int) -> None:
    """Raises where a value of `index` is outside [low, high]. Syncs."""
    bad = ((index < low) | (index > high)).nonzero()
    if bad.numel():
        i = int(bad[0, 0])
        raise ArgumentError(op, name, f"values in [{low}, {high}]", f"{int(index[i])} at index {i}")


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=3, requests=4, width=8), **change}


SPEC = OpSpec(
    get_last_loc,
    core=True,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "prefix_lens": TensorArg("bs", INDEX),
    },
    oracle=_oracle,
    returns=TensorArg("bs", "prefix_lens"),
    make=_make,
    check_values=_check_values,
    samples=(
        *(Sample(f"{i}-{p}", {"index": i, "lens": p}) for i in ("i32", "i64") for p in ("i32", "i64")),
        Sample("one", {"bs": 1}),
        Sample("empty", {"bs": 0}, control="one"),
        Sample("past-one-block", {"bs": 1500, "requests": 64}),
        Sample("strided-table", {"view": "strided"}),
        Sample("edge", {"bs": 40, "values": "edge"}),
        Sample("edge-i32", {"bs": 40, "values": "edge", "index": "i32", "lens": "i32", "view": "strided"}),
        Sample("extreme", {"bs": 41, "values": "extreme"}),
        Sample("extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "lens": "i32"}),
        Sample("no-request", {"bs": 7, "values": "none"}),
        Sample("one-request-many-times", {"bs": 70, "values": "equal"}),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        ErrorSample("table-of-int64", "req_to_token", lambda: _small(req_to_token=_host.zeros(4, 8).long())),
        ErrorSample("table-of-rank-1", "req_to_token", lambda: _small(req_to_token=_host.zeros(8, dtype=torch.int32))),
        ErrorSample(
            "table-transposed", "req_to_token", lambda: _small(req_to_token=_host.zeros(8, 4, dtype=torch.int32).T)
        ),
        ErrorSample("float-requests", "req_pool_indices", lambda: _small(req_pool_indices=_host.zeros(3))),
        ErrorSample("lengths-disagree", "prefix_lens", lambda: _small(prefix_lens=_host.ones(4, dtype=torch.int64))),
        ErrorSample("lens-strided", "prefix_lens", lambda: _small(prefix_lens=_host.ones(6, dtype=torch.int64)[::2])),
        ErrorSample("lens-a-list", "prefix_lens", lambda: _small(prefix_lens=[1, 2, 3])),
        ErrorSample("lens-none", "prefix_lens", lambda: _small(prefix_lens=None)),
    ),
    ragged={
        "bs": (0, 300), "requests": (1, 40), "width": (1, 80), "index": ("i32", "i64"), "lens": ("i32", "i64"),
        "view": ("plain", "strided"), "values": ("valid", "skip", "edge", "extreme"),
    },
    # Every other request is skipped, and every other length beside it: "skip" leaves nothing to find.
    fresh=replace(table_fresh({}), beside={"values": ("valid", "edge", "extreme")}),
)  # fmt: skip
