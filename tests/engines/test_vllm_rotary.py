"""hal's rotary embeddings in vLLM without an engine: LongRoPE beside vLLM's own class, and which backend rotates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as phi3

import hal
from hal.engines import EngineError
from hal.engines.vllm import rotary

STOCK = phi3.Phi3LongRoPEScaledRotaryEmbedding
SHORT, LONG, HEAD, ROTARY = 64, 256, 24, 16
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(ROTARY // 2)],
    "long_factor": [2.0 + 0.7 * i for i in range(ROTARY // 2)],
}


def made(cls: Any, longest: int, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    """One of a model whose requests have at most `longest` tokens."""
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
    monkeypatch.setattr(phi3, "get_current_vllm_config", lambda: config)
    return cls(HEAD, ROTARY, LONG, SHORT, 10000.0, True, torch.float32, **{**FACTORS, **changed})


def rotated(layer: Any, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(len(positions), heads * HEAD, generator=g).to(dtype) for heads in (4, 2))
    return [x.double() for x in layer(positions, q, k)]


@pytest.mark.parametrize("longest", [SHORT, SHORT + 1, LONG])
@pytest.mark.parametrize("scaled", [{}, {"short_mscale": 0.9, "long_mscale": 1.3}])
def test_long_rope_is_vllms(longest: int, scaled: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is chosen by the longest request, so the last position of it is one of the long one."""
    stock = made(STOCK, longest, monkeypatch, **scaled)
    ours = made(rotary.HalPhi3LongRoPEScaledRotaryEmbedding, longest, monkeypatch, **scaled)
    positions = torch.tensor([0, 1, 7, SHORT - 1, longest - 1])
    for a, b in zip(rotated(ours, positions), rotated(stock, positions), strict=True):
        assert (a - b).abs().max() <= 4e-7 * b.abs().max()


def test_the_two_tables_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.tensor([0, 1, 7, SHORT - 1])
    cls = rotary.HalPhi3LongRoPEScaledRotaryEmbedding
    short, far = (rotated(made(cls, n, monkeypatch), positions) for n in (SHORT, LONG))
    assert (short[0][1:] - far[0][1:]).abs().max() > 0.1


def test_long_rope_in_bfloat16_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.arange(LONG)
    ours = made(rotary.HalPhi3LongRoPEScaledRotaryEmbedding, LONG, monkeypatch)
    table = ours.cos_sin_cache.double()
    g = torch.Generator().manual_seed(2)
    q = torch.randn(LONG, 4 * HEAD, generator=g).bfloat16().double().view(LONG, 4, HEAD)
    cos, sin = (table[positions, None, i : i + ROTARY // 2] for i in (0, ROTARY // 2))
    a, b = q[..., : ROTARY // 2], q[..., ROTARY // 2 : ROTARY]
    want = torch.cat([a * cos - b * sin, b * cos + a * sin, q[..., ROTARY:]], -1).flatten(1)
    found, _ = rotated(ours, positions, torch.bfloat16)
    assert ((found - want).abs() <= 2**-8 * want.abs() + 1e-6).all()


def test_vllm_makes_ours_where_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT, **FACTORS}
    monkeypatch.setattr(rotary_embedding, rotary.LONG, STOCK)
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LONG))
    monkeypatch.setattr(phi3, "get_current_vllm_config", lambda: config)

    def one() -> str:
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        return type(rotary_embedding.get_rope(ROTARY, LONG, True, parameters)).__name__

    with set_current_vllm_config(VllmConfig()):
        assert one() == STOCK.__name__
        with pytest.raises(EngineError, match="Phi3LongRoPE"):
            rotary.check_instances()
        rotary.register({})
        assert one() == f"Hal{STOCK.__name__}"
        rotary.check_instances()


def test_another_class_in_its_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_embedding, rotary.LONG, torch.nn.Module)
    with pytest.raises(EngineError, match=r"rotary_embedding\.Phi3LongRoPE.* is not the class it was"):
        rotary.classes()


@pytest.fixture
def _reloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    hal.configure(trace="")
    hal.reload()


@pytest.mark.usefixtures("_reloaded")
def test_it_runs_on_what_hal_chooses_after_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for backend in ("cpu", "reference"):
        monkeypatch.setenv("HAL_BACKEND", backend)
        hal.reload()
        hal.configure(trace="1")
        q, k = torch.ones(2, 4 * HEAD), torch.ones(2, 2 * HEAD)
        rotary.rotate(torch.tensor([0, 1]), q, k, torch.ones(3, ROTARY), HEAD, True)
        ran += [row.backend for row in hal.trace(reset=True).rows]
    assert ran == ["cpu", "reference"]
