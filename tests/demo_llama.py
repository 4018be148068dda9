"""A small Llama with random weights, the demo's engine on it, and what its tests look at. Needs transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hal.demo.check import compare
from hal.demo.engine import Engine, Request
from hal.demo.meter import Meter
from hal.demo.model import Llama

CPU = torch.device("cpu")
SYSTEM = list(range(20, 33))
EOS = 5


@cache
def transformers_llama(tied: bool = True, eos: int = EOS) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=eos,
        pad_token_id=EOS,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def engine(
    slots: int = 240,
    host_slots: int = 240,
    running: int = 3,
    page_size: int = 4,
    tied: bool = True,
    ops: Any = None,
    record: Any = None,
) -> Engine:
    theirs = transformers_llama(tied)
    model = Llama(theirs.config, theirs.state_dict(), ops or Meter(CPU))
    return Engine(
        model,
        slots=slots,
        host_slots=host_slots,
        max_running=running,
        max_length=80,
        page_size=page_size,
        record=record,
    )


def prompts(n: int) -> list[list[int]]:
    return [SYSTEM + [40 + i] * (3 + 2 * i) for i in range(n)]


def assert_same_tokens(requests: list[Request], tied: bool = True) -> None:
    for r in requests:
        assert compare(transformers_llama(tied), r).equal, f"request {r.number}"


def assert_nothing_held(e: Engine) -> None:
    """No leak: every page, host page, row and published prefix is free again."""
    cache = e.cache
    assert sorted(cache.free.tolist()) == list(range(cache.pool.num_slots // cache.page_size))
    assert cache.host_free.available == cache.host.num_slots // cache.page_size * cache.page_size
    assert len(cache.rows) == cache.req_to_token.shape[0]
    assert not cache._shared
    assert not cache._holders
    assert not cache._page_of
    assert not cache._prefix_of
    assert (cache.req_to_token == -1).all()


def happened(e: Engine, what: str) -> list[tuple[int, int]]:
    return [(event.request.number, event.tokens) for event in e.events if event.what == what]
