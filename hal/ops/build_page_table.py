"""build_page_table: the pages of each request, a row each, for attention that reads page tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.ops._spans import check_page_size
from hal.ops._torch import in_range
from hal.ops.get_last_loc import check_range
from hal.ops.proofs.fresh import COLUMNS, MANY, PAIRS, Wide, table_fresh
from hal.ops.proofs.inputs import INDEX_DTYPES, generator, odd_indices, randint, row_view
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import INDEX, ErrorSample, OpSpec, Sample, TensorArg, ValueArg


def build_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> Tensor:
    """``out[i, p] = req_to_token[r_i, p * page_size] // page_size`` for every page that request i has tokens in.

    Else -1: past the request's last page, for a slot below 0, outside the table. `out` is overwritten whole.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view. The slots of a
            page's tokens are consecutive, so its first one says which page it is.
        req_pool_indices: ``[bs]`` int32 or int64, rows of the table. Any value is safe.
        kv_lens: ``[bs]`` int32 or int64, tokens of each request. Any value is safe.
        page_size: slots in a page, 1 to 2^30; any, not only a power of two.
        out: ``[bs, max_pages]`` int32 or int64; may be a row-strided view.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device, stride or page size.

    Example:
        >>> import torch, hal
        >>> table = torch.tensor([[8, 9, 10, 11, 4, 5], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
        >>> hal.build_page_table(table, torch.tensor([0]), torch.tensor([5]), 4, torch.empty(1, 3, dtype=torch.int32))
        tensor([[ 2,  1, -1]], dtype=torch.int32)

    Source: the page tables of SGLang's FlashAttention backend, ``req_to_token[:, ::page_size] // page_size``.
    """
    rows, width = req_to_token.shape
    if out.numel() == 0:
        return out
    if rows == 0 or width == 0:
        return out.fill_(-1)
    column = torch.arange(out.shape[1], device=out.device, dtype=torch.int64) * page_size
    request = req_pool_indices.to(torch.int64).unsqueeze(1)
    valid = in_range(request, rows) & (column < kv_lens.to(torch.int64).unsqueeze(1)) & (column < width)
    slot = req_to_token[torch.where(valid, request, 0), torch.where(valid, column, 0)]
    return out.copy_(torch.where(valid & (slot >= 0), slot // page_size, -1))


def _oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    table, out, page = a["req_to_token"], a["out"], a["page_size"]
    rows, width = table.shape
    value = _host.full(out.shape, -1, dtype=out.dtype)
    for i, (r, n) in enumerate(zip(a["req_pool_indices"].tolist(), a["kv_lens"].tolist(), strict=True)):
        if 0 <= r < rows:
            firsts = table[r, : min(max(n, 0), width) : page].tolist()[: out.shape[1]]
            value[i, : len(firsts)] = _host.tensor(
                [s // page if s >= 0 else -1 for s in firsts], dtype=out.dtype
            )
    full = Want(torch.ones_like(value, dtype=torch.bool), (Candidate(value),))
    return {"out": full, "return": full}


def _make(
    seed: int = 0,
    bs: int = 5,
    requests: int = 9,
    width: int = 65,
    page_size: int = 16,
    pages: int = 6,
    index: str = "i64",
    lens: str = "i64",
    out: str = "i32",
    view: str = "plain",
    out_view: str = "plain",
    values: str = "valid",
    holes: bool = False,
) -> dict[str, Any]:
    """`holes`: some slots of the table are below 0."""
    g = generator(seed)
    table = randint(g, 0, 2**31 - 1, (requests, width)).to(torch.int32)
    if holes:
        table[::2, ::3] = -1
        table[1::2, ::2] = torch.iinfo(torch.int32).min
    fill = randint(g, 0, 2**31 - 1, (bs, pages)).to(INDEX_DTYPES[out])
    return {
        "req_to_token": row_view(table, view),
        "req_pool_indices": odd_indices(
            randint(g, 0, requests, (bs,)), requests, values, INDEX_DTYPES[index]
        ).roll(1 if values in ("edge", "extreme") else 0),
        "kv_lens": odd_indices(randint(g, 0, width + 1, (bs,)), width + 1, values, INDEX_DTYPES[lens]),
        "page_size": page_size,
        "out": row_view(fill, out_view),
    }


def _check_sizes(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> None:
    # Not of the call's kind, which is checked once, but of each call.
    check_page_size("build_page_table", page_size)


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    check_range("build_page_table", "req_pool_indices", a["req_pool_indices"], -1, rows - 1)
    check_range("build_page_table", "kv_lens", a["kv_lens"], 0, width)


def _small(**change: Any) -> dict[str, Any]:
    return {**_make(bs=3, requests=4, width=8, page_size=2), **change}


SPEC = OpSpec(
    build_page_table,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "kv_lens": TensorArg("bs", INDEX),
        "page_size": ValueArg(),
        "out": TensorArg("bs max_pages", INDEX, stride="inner", mutated=True),
    },
    oracle=_oracle,
    returns="out",
    make=_make,
    check_sizes=_check_sizes,
    check_values=_check_values,
    samples=(
        *(
            Sample(f"{i}-{n}-{o}", {"index": i, "lens": n, "out": o})
            for i, n, o in (("i32", "i32", "i32"), ("i64", "i64", "i64"), ("i32", "i64", "i64"), ("i64", "i32", "i32"))
        ),
        *(Sample(f"page-{p}", {"page_size": p, "pages": 70 // p + 2, "bs": 20}) for p in (1, 3, 7, 64)),
        Sample("one", {"bs": 1}),
        Sample("empty", {"bs": 0}, control="one"),
        Sample("no-pages", {"pages": 0}, control="one"),
        Sample("too-few-columns", {"pages": 2, "page_size": 4}),
        Sample("past-one-block", {"bs": 300, "requests": 64, "width": 3000, "page_size": 2, "pages": 1400}),
        Sample("huge-page", {"page_size": 2**30, "pages": 5000}),
        Sample("holes", {"bs": 40, "holes": True, "page_size": 1, "pages": 60}),
        Sample("strided-table", {"view": "strided", "bs": 40}),
        Sample("strided-out", {"out_view": "strided", "bs": 40}),
        Sample("edge", {"bs": 40, "values": "edge", "page_size": 5, "pages": 15}),
        Sample("extreme", {"bs": 41, "values": "extreme", "page_size": 5, "pages": 15}),
        Sample(
            "extreme-i32", {"bs": 41, "values": "extreme", "index": "i32", "lens": "i32", "page_size": 3, "pages": 30},
        ),
        Sample("no-rows", {"requests": 0}),
        Sample("no-columns", {"width": 0}),
        Sample("far-rows", {"bs": 64, "requests": 5, "view": "far"}, large=True),
    ),
    errors=(
        ErrorSample(
            "table-of-int64", "req_to_token", lambda: _small(req_to_token=_host.zeros(4, 8, dtype=torch.int64)),
        ),
        ErrorSample("page-zero", "page_size", lambda: _small(page_size=0)),
        ErrorSample("page-huge", "page_size", lambda: _small(page_size=2**30 + 1)),
        ErrorSample("page-float", "page_size", lambda: _small(page_size=16.0)),
        ErrorSample("page-true", "page_size", lambda: _small(page_size=True)),
        ErrorSample("out-of-rank-1", "out", lambda: _small(out=_host.zeros(3, dtype=torch.int32))),
        ErrorSample("out-rows-disagree", "out", lambda: _small(out=_host.zeros(4, 3, dtype=torch.int32))),
        ErrorSample("out-transposed", "out", lambda: _small(out=_host.zeros(4, 3, dtype=torch.int32).T)),
        ErrorSample("lens-float", "kv_lens", lambda: _small(kv_lens=_host.zeros(3))),
    ),
    ragged={
        "bs": (0, 90), "requests": (1, 40), "width": (1, 200), "page_size": (1, 70), "pages": (0, 90),
        "index": ("i32", "i64"), "lens": ("i32", "i64"), "out": ("i32", "i64"), "view": ("plain", "strided"),
        "out_view": ("plain", "strided"), "values": ("valid", "skip", "edge", "extreme"), "holes": (False, True),
    },
    fresh=table_fresh(
        {"pages": (1, 8), "page_size": (1, 3)},
        width=Wide(COLUMNS, {"bs": MANY, "requests": (30, 40), "page_size": (50, 70), "pages": (330, 400)}),
        pages=Wide(PAIRS, {"bs": (20, 30), "requests": (30, 40), "page_size": (1, 2), "width": COLUMNS}),
    ),
)  # fmt: skip
