"""The tables of attention as real models have it: their heads, their sliding windows and caps, decode and prompts.

A model that several GPUs share has its heads over their number there. Beside FA3 and FlashInfer, as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hal.bench import Row
from hal.bench.cuda import attention
from hal.bench.cuda.harness import table_of


@dataclass(frozen=True)
class Model:
    """What attention of one kind of layer of a model is.

    Args:
        name: the model's; with ``/ n`` of n GPUs.
        heads: query heads, key/value heads, head_dim, of one of them.
        window: how many tokens before its own a query sees (one less than the ``sliding_window`` of a config); -1: all.
        cap: of its logits; 0: none.
    """

    name: str
    heads: tuple[int, int, int]
    window: int = -1
    cap: float = 0.0


MODELS = (
    Model("Llama-2-7B", (32, 32, 128)),
    Model("Phi-3-mini", (32, 32, 96), 2046),
    Model("Llama-3.2-3B", (24, 8, 128)),
    Model("Qwen2.5-7B", (28, 4, 128)),
    Model("Qwen2.5-32B", (40, 8, 128)),
    Model("Mixtral-8x22B", (48, 8, 128)),
    Model("GLM-4.5", (96, 8, 128)),
    Model("Qwen3-235B", (64, 4, 128)),
    Model("Llama-3.1-405B / 8", (16, 1, 128)),
    Model("Qwen2.5-0.5B", (14, 2, 64)),
    Model("Qwen3-Next", (16, 2, 256)),
    Model("Mistral-7B", (32, 8, 128), 4095),
    Model("gpt-oss", (64, 8, 64)),
    Model("gpt-oss", (64, 8, 64), 127),
    Model("Gemma-2-9B", (16, 8, 256), 4095, 50.0),
    Model("Gemma-2-9B", (16, 8, 256), -1, 50.0),
    Model("Gemma-2-27B", (32, 16, 128), 4095, 50.0),
    Model("Gemma-3-12B", (16, 8, 256), 1023),
    Model("Gemma-3-27B", (32, 16, 128), 1023),
    Model("Gemma-3-27B", (32, 16, 128)),
)
DECODE = ((1, 8192), (16, 4096), (64, 2048), (256, 1024))
"""(bs, keys each)."""
EXTEND = ((1, 2048, 2048), (4, 512, 2560), (16, 300, 1000), (8, 4, 4096))
"""(bs, new tokens each, keys each with them)."""
CACHES = (torch.bfloat16, torch.float8_e4m3fn)


def _rows(op: str, points: Sequence[tuple[int, int, int]], quick: bool) -> list[Row]:
    """Of a batch, new tokens each and keys each, of all models in bf16, then over e4m3."""
    models, caches, rounds = (MODELS[-2:-1], CACHES[:1], 3) if quick else (MODELS, CACHES, 9)
    return table_of(
        partial(
            attention.attention_row, op=op, bs=bs, new=new, keys=keys, rounds=rounds, heads=model.heads, cache=cache,
            window=model.window, cap=model.cap, about={"model": model.name},
        )
        for cache in caches
        for model in models
        for bs, new, keys in points[: 1 if quick else None]
    )  # fmt: skip


def decode_attention(quick: bool = False) -> list[Row]:
    return _rows("decode_attention", [(bs, 1, keys) for bs, keys in DECODE], quick)


def extend_attention(quick: bool = False) -> list[Row]:
    return _rows("extend_attention", EXTEND, quick)


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "decode_attention": decode_attention,
    "extend_attention": extend_attention,
}
