"""Faults in what a backend allocates, in what empty sizes and other requests' values do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sabotage._healthy import calling, fault


@fault("decode_attention", r"under a default device meta: .*", "defaults")
def result_on_the_default_device(good: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any, **kwargs: Any) -> Tensor:
        found = good(*args, **kwargs)
        kept = torch.empty(found.shape, dtype=found.dtype)
        return kept.copy_(found) if kwargs["out"] is None else found

    return broken


@calling("get_last_loc", r"under a default device meta: .*", "defaults")
def scratch_on_the_default_device(
    good: Any, req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor
) -> Tensor:
    rows = torch.arange(len(prefix_lens))
    return good(req_to_token, req_pool_indices[rows], prefix_lens[rows])


@calling("rope_kv_write", r"under a default dtype bf16: .*wrong", "defaults")
def table_in_the_default_dtype(good: Any, **a: Any) -> None:
    table = a["cos_sin_cache"]
    good(**{**a, "cos_sin_cache": table.to(torch.get_default_dtype()).to(table.dtype)})


@calling("kv_write", r"ZeroDivisionError", "empty")
def divides_by_the_heads(good: Any, **a: Any) -> None:
    _ = 16 // a["k"].shape[1]
    good(**a)


@calling("decode_attention", r"got nan", "value")
def a_nan_of_another_request(good: Any, **a: Any) -> Tensor:
    found = good(**a)
    rows = a["v_cache"].reshape(-1, *a["v_cache"].shape[-2:])
    listed = a["kv_indices"].long()
    heard = rows[listed[(listed >= 0) & (listed < len(rows))]].float()
    # As where a weight of 0 meets the values of all requests.
    return found.add_(torch.nan) if bool(heard.isnan().any()) else found
