"""Names of Ascend's that hal's ops don't cover, each with the reason; calling one raises `Unsupported`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hal.engines.sglang.kernels._common import Unsupported

REASONS: dict[str, str] = {
    "assign_cache_op": "its source is any ranges of a row; hal.write_req_to_token takes the slots packed",
    "split_qkv_tp_rmsnorm_rope": "its norm is over all heads of all ranks; hal's is by head",
    "triton_split_qkv_rmsnorm_mrope": "its angles are of three axes (M-RoPE); hal's tables have one position a token",
    "npu_mrope": "its angles are of three axes (M-RoPE); hal's tables have one position a token",
    "npu_rotary_mul": "it rotates one tensor, of any layout, by an angle an element; hal.rope_kv_write rotates q and k",
    "npu_interleave_rope": "it leaves the two halves of the pairs apart; hal.rope_kv_write leaves pairs where they are",
    "npu_kv_rmsnorm_rope_cache": "it normalises the latent row; hal.mla_rope_kv_write takes it normalised",
    "fused_split_qk_norm": "a norm without a rotation or a write is no op of hal's",
    "mla_preprocess": "it begins with matrix products and quantization; hal.mla_rope_kv_write takes their results",
    "transfer_state_per_layer_direct_pf_lf": "states of linear attention are no KV cache",
    "transfer_state_all_layer_direct_lf_pf": "states of linear attention are no KV cache",
}
"""Name -> why."""


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function of this name that says why not."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise Unsupported(f"hal: {name}: {REASONS[name]}")

    refused.__name__ = name
    refused.__doc__ = f"Refused: {REASONS[name]}."
    return refused
