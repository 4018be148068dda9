"""Log-sum-exps of very many keys, where what each tile loses adds up: of each kernel that goes over tiles of keys.

On a GPU (``ci/h200``) alone: where logits come from, an interpreter rounds what a device fuses.
"""

from __future__ import annotations

import os

import pytest
import torch
from many_keys import LIMIT, made, worst

pytest.importorskip("triton", reason="Triton is not installed here")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available(), reason="no GPU"
)

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


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_many_keys(form: str) -> None:
    from hal.backends.cuda import inspect

    args = made(*FORMS[form], "cuda")
    inspect.launcher(FORMS[form][0])(**args)
    assert worst(args) < LIMIT
