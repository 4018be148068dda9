"""Log-sum-exps of very many keys, where what each tile loses adds up: of each kernel that goes over tiles of keys.

On a GPU (``ci/h200``) alone: where logits come from, an interpreter rounds what a device fuses.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available(), reason="no GPU"
)

KEYS = 1 << 17
LIMIT = 1e-5
"""Ten units in the last place of the sums, which are near 12."""
E4M3 = torch.float8_e4m3fn
FORMS: dict[str, tuple[str, int, tuple[int, int, int, int], torch.dtype, torch.dtype]] = {
    "extend-fp32": ("extend_attention", 3, (2, 1, 64, 64), torch.float32, torch.float32),
    **{
        f"extend-{dim}-{v_dim}": ("extend_attention", 2048, (16, 2, dim, v_dim), torch.bfloat16, torch.bfloat16)
        for dim, v_dim in ((64, 64), (128, 128), (192, 128), (256, 256))
    },
    "extend-128-e4m3": ("extend_attention", 2048, (16, 2, 128, 128), torch.bfloat16, E4M3),
    "extend-mla": ("extend_attention", 64, (128, 1, 576, 512), torch.bfloat16, torch.bfloat16),
    **{
        f"decode-{heads}-{dim}-{str(cache).split('.')[1]}": (
            "decode_attention",
            128,
            (heads, kv_heads, dim, dim),
            torch.bfloat16,
            cache,
        )
        for cache in (torch.bfloat16, E4M3)
        for heads, kv_heads, dim in ((8, 1, 128), (8, 2, 64))
    },
    "decode-fp32": ("decode_attention", 128, (2, 1, 64, 64), torch.float32, torch.float32),
    **{
        f"decode-mla-{heads}-{str(cache).split('.')[1]}": (
            "decode_attention",
            64,
            (heads, 1, 576, 512),
            torch.bfloat16,
            cache,
        )
        for cache in (torch.bfloat16, E4M3)
        for heads in (128, 16)
    },
}
"""(op, queries, (query heads, key/value heads, head_dim, v_head_dim), of queries, of the cache)."""


def made(form: str) -> dict[str, Any]:
    """All queries see the same keys: where decode has many requests, a program has many tiles of one."""
    op, n, (q_heads, kv_heads, dim, v_dim), dtype, cache = FORMS[form]
    g = torch.Generator("cuda").manual_seed(len(form))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    k = normal(KEYS, kv_heads, dim).to(cache)
    v = k[..., :v_dim] if dim == 576 else normal(KEYS, kv_heads, v_dim).to(cache)
    slots = torch.randperm(KEYS, generator=g, device="cuda").int()
    requests = n if op == "decode_attention" else 1
    args = {
        "q": normal(n, q_heads, dim).to(dtype),
        "k_cache": k,
        "v_cache": v,
        "kv_indptr": torch.arange(requests + 1, device="cuda") * KEYS,
        "kv_indices": slots.repeat(requests),
        "lse": torch.zeros(n, q_heads, device="cuda"),
        "scale": dim**-0.5,
    }
    return args if op == "decode_attention" else {**args, "qo_indptr": torch.tensor([0, n]).cuda(), "causal": False}


def truth(args: dict[str, Any], which: list[int]) -> Tensor:
    """The sums of some queries."""
    k = args["k_cache"].double()
    q = args["q"][which].double().unflatten(1, (k.shape[1], -1))
    return (torch.einsum("nhgd,jhd->nhgj", q, k) * args["scale"]).logsumexp(-1).flatten(1)


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_many_keys(form: str) -> None:
    from hal.backends.cuda import inspect

    args = made(form)
    inspect.launcher(FORMS[form][0])(**args)
    n = args["q"].shape[0]
    which = [0, n // 2, n - 1]
    worst = (args["lse"][which].double() - truth(args, which)).abs().max().item()
    assert worst < LIMIT, f"{form}: {worst:.1e}"
