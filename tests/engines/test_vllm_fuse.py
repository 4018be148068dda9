"""The pass that makes the rotation and the write of the cache one call: where it may, where it may not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
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


FUSED, ROTATED, APART, ALONE = (
    {"rope_kv_write": 1},
    {"rope_": 1, "unified_kv_cache_update": 1},
    {"rope": 1, "unified_kv_cache_update": 1},
    {"rope_": 1},
)


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
