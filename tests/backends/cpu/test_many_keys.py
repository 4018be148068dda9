"""Log-sum-exps of very many keys, where what each tile loses adds up."""

from __future__ import annotations

import pytest
import torch
from many_keys import LIMIT, made, worst

import hal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 1, 64, 64), (8, 2, 128, 128), (16, 1, 576, 512)], ids=str)
@pytest.mark.parametrize(("op", "n"), [("decode_attention", 1), ("extend_attention", 3)])
def test_sums_of_many_keys(op: str, n: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    args = made(op, n, heads, dtype, dtype, "cpu")
    getattr(hal, op)(**args)
    assert worst(args) < LIMIT
