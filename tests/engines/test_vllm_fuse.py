"""The pass that makes the rotation and the write of the cache one call: where it may, where it may not."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from torch.fx.experimental.proxy_tensor import make_fx
from vllm.utils.torch_utils import _encode_layer_name

from hal.engines.vllm import fuse, rotary

assert rotary.LIBRARY
D, Q, K, N = 8, 32, 16, 5
NOPE, LORA = 4, 16


def split(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split((x @ w), [Q, K, K], -1)


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> Any:
    return torch.ops.hal_vllm.rope(positions, q, k, table, D, True)


def write(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.vllm.unified_kv_cache_update(k.view(-1, 2, D), v.view(-1, 2, D), _encode_layer_name("layer"))


def plain(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, v = split(x, w)
    q, k = rope(q, k, positions, table)
    return q.view(-1, 4, D), write(k, v)


def split_for_each(x: Any, w: Any, positions: Any, table: Any) -> Any:
    """As AOTAutograd leaves a projection whose parts are used apart."""
    y = x @ w
    q, k, v = (torch.split(y, [Q, K, K], -1)[i] for i in range(3))
    q, k = rope(q, k, positions, table)
    return q.view(-1, 4, D), write(k, v)


def viewed_before(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, v = split(x, w)
    q, k = rope(q, k, positions, table)
    q = q.view(-1, 4, D)
    return q, write(k, v), q + 1


def normed(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, v = split(x, w)
    q, k = rope(torch.tanh(q), torch.tanh(k), positions, table)
    return q, write(k, v)


def read_before(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, v = split(x, w)
    q, k = rope(q, k, positions, table)
    more = q + 1
    return more, write(k, v)


def read_unrotated(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, v = split(x, w)
    q2, k2 = rope(q, k, positions, table)
    return q2, write(k2, v), k + 1


def scaled_between(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, v = split(x, w)
    q, k = rope(q, k, positions, table)
    return q, write(k * 2, v)


def an_input(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k = rope(x, x[:, :16].clone(), positions, table)
    return q, write(k, x[:, 16:32].clone())


def transposed(x: Any, w: Any, positions: Any, table: Any) -> Any:
    y = x @ w
    q, k = rope(y.t().t()[:, :Q], torch.tanh(y[:, Q : Q + K]), positions, table)
    return q, write(k, y[:, Q + K :].clone()), y + 1


def unwritten(x: Any, w: Any, positions: Any, table: Any) -> Any:
    q, k, _ = split(x, w)
    return rope(q, k, positions, table)


def put_back(q: torch.Tensor, part: torch.Tensor, begin: int = NOPE) -> torch.Tensor:
    """What functionalization makes of ``q[..., begin:] = part``."""
    end = sys.maxsize if begin else D
    return torch.ops.aten.slice_scatter(q, torch.ops.aten.copy(q[..., begin:end], part), 2, begin, end)


def write_latent(latent: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scale = torch.ones((), device=k.device)
    return torch.ops.vllm.unified_mla_kv_cache_update(torch.tanh(latent), k, _encode_layer_name("layer"), "auto", scale)


def latent(
    x: Any,
    w: Any,
    positions: Any,
    table: Any,
    begin: int = NOPE,
    also: Callable[[Any, Any], Any] | None = None,
    scale: float = 1.0,
) -> Any:
    """As DeepSeek's layer: two heads of 12, the last 8 of them rotated; `also`: what else reads q and k before that."""
    q = (x @ w[:, : 2 * (NOPE + D)]).view(-1, 2, NOPE + D)
    c, k = torch.split(x @ w[:, :24], [LORA, D], -1)
    more = also(q, k) if also else None
    part, k = torch.ops.hal_vllm.rope(positions, q[..., NOPE:], k.unsqueeze(1), table, D, False)
    q = put_back(q, part, begin)
    return (q * scale if scale != 1.0 else q), write_latent(c, k), more


def latent_of_one_projection(x: Any, w: Any, positions: Any, table: Any) -> Any:
    """DeepSeek-V3's: q is made of a latent too, and both latents and the rotated key are of one projection."""
    both = x @ w
    q, kv = torch.split(both, [40, LORA + D], -1)
    c, _ = torch.split(kv, [LORA, D], -1)
    _, k = torch.split(torch.split(both, [40, LORA + D], -1)[1], [LORA, D], -1)
    q = (torch.tanh(q) @ w[:24, :24].repeat(2, 1)[:40]).view(-1, 2, NOPE + D)
    part, k = torch.ops.hal_vllm.rope(positions, q[..., NOPE:], k.unsqueeze(1), table, D, False)
    return put_back(q, part), write_latent(c, k)


FUSED, ROTATED, APART, ALONE = (
    {"rope_kv_write": 1},
    {"rope_": 1, "unified_kv_cache_update": 1},
    {"rope": 1, "unified_kv_cache_update": 1},
    {"rope_": 1},
)
LATENT, LATENT_APART = {"mla_rope_kv_write": 1}, {"rope": 1, "unified_mla_kv_cache_update": 1}


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (plain, FUSED),
        (split_for_each, FUSED),
        (viewed_before, FUSED),
        (normed, FUSED),
        (read_before, ROTATED),
        (read_unrotated, APART),
        (scaled_between, ROTATED),
        (an_input, APART),
        (transposed, APART),
        (unwritten, ALONE),
        (partial(latent), LATENT),
        (latent_of_one_projection, LATENT),
        (partial(latent, also=lambda q, k: q.sum()), LATENT_APART),
        (partial(latent, begin=0), LATENT_APART),
        (partial(latent, also=lambda q, k: k + 1), LATENT_APART),
        (partial(latent, scale=2.0), LATENT_APART),
    ],
)
def test_fused_where_it_may_be(function: Callable[..., Any], want: dict[str, int]) -> None:
    x, w = torch.randn(N, Q), torch.randn(Q, Q + 2 * K)
    positions, table = torch.arange(N), torch.randn(16, D)
    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x, w, positions, table)
    fuse.Fusion()(traced.graph)
    found = Counter(
        node.target._opname
        for node in traced.graph.nodes
        if getattr(node.target, "namespace", "") in ("hal_vllm", "vllm")
    )
    assert found == want, traced.graph


def test_it_has_a_name_for_caches() -> None:
    """By which compiled graphs of another version of the pass, or of none, are told apart."""
    assert fuse.Fusion().uuid() == fuse.Fusion().uuid()
    assert fuse.Fusion().uuid() != fuse.Fusion(before=fuse.Fusion()).uuid()
