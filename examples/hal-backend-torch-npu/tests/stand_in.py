"""npu_fused_infer_attention_score on CPU tensors, and the plugin on top of it: the backend `torch-npu-stand-in`.

The stand-in has the documented signature, refuses what torch_npu's documentation rules out, computes in float64, and
leaves garbage where no promise is made. So a mapping that is wrong gives a wrong result; what it can't show is whether
torch_npu does what its documentation says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import hal_backend_torch_npu
import torch
from torch import Tensor

from hal.registry import Backend, hookimpl

NAME = "torch-npu-stand-in"
calls: list[str] = []
"""How many requests and queries each call had, and how their keys were found."""


def visible_keys(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """(query, first key, end of keys) of each query that sees any, the last query aligned with the last key. Where a
    causal request has fewer keys than queries, libraries differ: none may be asked for."""
    assert not causal or keys >= queries
    for t in range(queries):
        yield t, 0, keys - (queries - t) + 1 if causal else keys


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query ``[heads, dim]`` over ``[keys, kv_heads, dim]``: output and natural log-sum-exp, in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("hd,jhd->hj", q.double(), k) * scale
    return torch.einsum("hj,jhd->hd", logits.softmax(-1), v), logits.logsumexp(-1)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    bs, queries, hidden = query.shape
    dim = hidden // num_heads
    assert input_layout == "BSH"
    assert bs <= 65536
    assert num_heads <= 256
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert all(t.is_contiguous() for t in (query, key, value))
    assert key.shape == value.shape
    assert isinstance(scale, float)
    assert isinstance(actual_seq_lengths_kv, list)
    assert len(actual_seq_lengths_kv) == bs
    assert min(actual_seq_lengths_kv) >= 1
    assert max(actual_seq_lengths_kv) <= (262144 if queries == 1 else 20971520)
    assert num_heads % num_key_value_heads == 0
    assert num_heads // num_key_value_heads <= 64
    assert key.shape[-1] == num_key_value_heads * dim
    assert dim % 16 == 0
    assert dim <= 512
    causal = sparse_mode == 3
    if queries == 1 or not causal:
        # For one query the mode is without effect, and a mask of keys would have another shape.
        assert (sparse_mode, atten_mask) == (0, None)
    else:
        assert atten_mask is not None
        assert atten_mask.dtype in (torch.bool, torch.int8, torch.uint8)
        assert torch.equal(atten_mask.bool(), torch.ones(2048, 2048, dtype=torch.bool, device="cpu").triu(1))
    if block_table is None:
        assert key.shape[0] == bs
        assert key.shape[1] >= max(actual_seq_lengths_kv)
        rows = [key, value]
        # Nothing says that rows past a length are not multiplied by weights of 0.
        assert not any(r[i, n:].isnan().any() for r in rows for i, n in enumerate(actual_seq_lengths_kv))
        calls.append(f"{bs} x {queries} gathered")
    else:
        assert block_table.dtype == torch.int32
        assert block_size == key.shape[1]
        assert block_size % (16 if queries == 1 else 128) == 0
        assert block_size <= 512
        assert key.shape[-1] <= 65535
        assert key.numel() < 2**31
        assert block_table.shape[0] == bs
        assert block_table.shape[1] * block_size >= max(actual_seq_lengths_kv)
        assert sum(-(-n // block_size) for n in actual_seq_lengths_kv) <= key.shape[0]
        assert ((block_table >= 0) & (block_table < key.shape[0])).all()
        rows = [c[block_table.long()].flatten(1, 2) for c in (key, value)]
        calls.append(f"{bs} x {queries} paged")
    out = torch.full_like(query, torch.nan)
    lse = torch.full((bs, num_heads, queries, 1), torch.nan, dtype=torch.float32, device="cpu")
    for i, n in enumerate(actual_seq_lengths_kv):
        k, v = (r[i, :n].view(n, num_key_value_heads, dim) for r in rows)
        for t, first, last in visible_keys(queries, n, causal):
            found, sums = attend(query[i, t].view(num_heads, dim), k[first:last], v[first:last], scale)
            out[i, t], lse[i, :, t, 0] = found.flatten().to(query.dtype), sums.float()
    return out, lse if softmax_lse_flag else torch.zeros(1, dtype=torch.float32, device="cpu")


def install(fused: Callable[..., tuple[Tensor, Tensor]] = npu_fused_infer_attention_score) -> None:
    """Puts `fused` in torch_npu's place."""
    module = ModuleType("torch_npu")
    module.npu_fused_infer_attention_score = fused  # type: ignore[attr-defined]
    sys.modules["torch_npu"] = module


install()


@hookimpl
def hal_backend() -> Backend:
    """The plugin's own manifest, for CPU tensors."""
    return replace(hal_backend_torch_npu.hal_backend(), name=NAME, lanes={"device": ("cpu",)}, requires=(), probe=None)
