"""build_kv_indices: the slots of all that each request attends to, packed for paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._checks import check_range
from hal.ops._spans import LONGEST, extents, spread
from hal.ops._torch import in_range
from hal.ops.spec import INDEX, OpSpec, TensorArg, describe


def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    given_indptr: Tensor | None = None,
) -> Tensor:
    """Packs ``req_to_token[r_i, start_i : start_i + kv_lens[i]]`` of every request into `out`, and says in
    `kv_indptr` where each begins; or packs them where `given_indptr` says.

    ``kv_indptr[i] = sum(kv_lens[j] for j < i)`` and ``out[kv_indptr[i] + t] = req_to_token[r_i, start_i + t]``.
    What would be read outside the table is -1. What is left of `out` stays as it was, so a buffer made for the
    largest batch costs a small one nothing; nothing is written past it. A length that is not in [0, 2^31) is 0.

    An engine that has the sums gives them instead, and no length is added up. They need not be the sums: list i ends
    after ``kv_lens[i]`` slots, before ``given_indptr[i + 1]`` or with `out`, whichever comes first, and what would
    lie before `out` is left out of it. Where two lists claim an element, it is one's.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64, rows of the table. Any value is safe.
        kv_lens: ``[bs]`` int32 or int64, tokens to list. Any value is safe.
        kv_indptr: ``[bs + 1]`` int32 or int64, overwritten; entries are at most capacity. None with `given_indptr`.
        out: ``[capacity]`` int32 or int64.
        kv_start: ``[bs]`` int32 or int64, the first column of each request (a sliding window's); None is 0.
            Any value is safe.
        given_indptr: ``[bs + 1]`` int32 or int64, where each list begins, read in place of the sums. Any value is
            safe.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride; both `kv_indptr` and `given_indptr`, or neither.

    Example:
        >>> import torch, hal
        >>> table = torch.arange(8, dtype=torch.int32).view(2, 4)
        >>> indptr, out = torch.empty(3, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        >>> hal.build_kv_indices(table, torch.tensor([1, 0]), torch.tensor([3, 2]), indptr, out)
        tensor([4, 5, 6, 0, 1, 0], dtype=torch.int32)
        >>> indptr
        tensor([0, 3, 5], dtype=torch.int32)

    Source: the contract of SGLang's ``create_flashinfer_kv_indices_triton``, which reads the sums that this
    writes unless it is given them: no second kernel, and none that don't fit the lengths.
    """
    rows, width = req_to_token.shape
    bs, capacity = kv_lens.shape[0], out.shape[0]
    _, length = extents(torch.zeros_like(kv_lens), kv_lens)
    if kv_indptr is not None:
        write_sums(length, kv_indptr, capacity)
    if bs == 0 or capacity == 0:
        return out
    i, t, used = spread(length, capacity) if given_indptr is None else _place(given_indptr, length, capacity)
    if rows == 0 or width == 0:
        return out.copy_(torch.where(used, -1, out))
    start = torch.zeros_like(length) if kv_start is None else kv_start.to(torch.int64)
    request, first = req_pool_indices.to(torch.int64)[i], start[i]
    # Compared before it is added, so that the sum can't wrap.
    valid = used & in_range(request, rows) & (first >= -t) & (first < width - t)
    column = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    found = req_to_token[torch.where(valid, request, 0), column].to(out.dtype)
    return out.copy_(torch.where(used, torch.where(valid, found, -1), out))


def _place(indptr: Tensor, length: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """`spread`, of lists that begin where `indptr` says."""
    # No list that begins further below reaches 0.
    begin, end = indptr[:-1].to(torch.int64).clamp(min=-LONGEST), indptr[1:].to(torch.int64)
    low, order = begin.sort()
    # Of the lists that begin no later, the one that ends last: if that doesn't reach an output, none does.
    high, last = torch.minimum(begin + length, end)[order].cummax(0)
    o = torch.arange(capacity, device=indptr.device, dtype=torch.int64)
    k = torch.searchsorted(low, o, right=True) - 1
    used = (k >= 0) & (o < high[k])
    i = order[last[k]]
    return i, torch.where(used, o - begin[i], 0), used


def write_sums(length: Tensor, kv_indptr: Tensor, capacity: int) -> None:
    """Where each of the lists begins and the last one ends, at most `capacity`."""
    kv_indptr[:1] = 0
    kv_indptr[1:] = length.cumsum(0).clamp(max=capacity).to(kv_indptr.dtype)


def _check_sizes(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Any,
    given_indptr: Tensor | None,
) -> None:
    if (kv_indptr is None) == (given_indptr is None):
        both = "neither" if kv_indptr is None else "both"
        raise ArgumentError("build_kv_indices", "given_indptr", "kv_indptr, or given_indptr in its place", both)
    for name, indptr in (("kv_indptr", kv_indptr), ("given_indptr", given_indptr)):
        if indptr is not None:
            check_indptr("build_kv_indices", kv_lens, indptr, name)


def check_indptr(op: str, kv_lens: Tensor, kv_indptr: Tensor, name: str = "kv_indptr") -> None:
    """Raises unless kv_indptr has one entry more than there are requests."""
    if kv_indptr.shape[0] != kv_lens.shape[0] + 1:
        raise ArgumentError(op, name, f"[bs + 1] = [{kv_lens.shape[0] + 1}]", describe(kv_indptr))


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    check_range("build_kv_indices", "req_pool_indices", a["req_pool_indices"], -1, rows - 1)
    check_range("build_kv_indices", "kv_lens", a["kv_lens"], 0, min(width, LONGEST))
    if a["kv_start"] is not None:
        check_range("build_kv_indices", "kv_start", a["kv_start"], 0, width)
    if a["given_indptr"] is not None:
        check_range("build_kv_indices", "given_indptr", a["given_indptr"], 0, a["out"].shape[0])


SPEC = OpSpec(
    build_kv_indices,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "kv_lens": TensorArg("bs", INDEX),
        "kv_indptr": TensorArg("bs_and_1", INDEX, mutated=True, optional=True),
        "out": TensorArg("capacity", INDEX, mutated=True),
        "kv_start": TensorArg("bs", INDEX, optional=True),
        "given_indptr": TensorArg("bs_and_1", INDEX, optional=True),
    },
    returns="out",
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.build_kv_indices",
)
