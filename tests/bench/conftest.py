"""The CUDA tables on the CPU, small and without their clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from hal import bench

Tables = Mapping[str, Callable[[bool], list[bench.Row]]]


def timed(calls: Mapping[str, Callable[[int], Any]], sets: int = 1, *_: Any, **__: Any) -> dict[str, float]:
    """A call instead of a clock."""
    for call in calls.values():
        call(sets - 1)
    return {name: 2.0 + i for i, name in enumerate(calls)}


def untimed(calls: Mapping[str, Callable[[int], Any]], *_: Any, **__: Any) -> dict[str, float]:
    return dict.fromkeys(calls, 1.0)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """All of them."""
    from hal.backends.cuda import decode_attention
    from hal.bench import timing
    from hal.bench.cuda import (
        attention,
        block_table,
        bookkeeping,
        harness,
        hicache,
        inputs,
        kv_copy,
        kv_write,
        launch,
        mla,
        models,
        pages,
        rope,
    )

    for module, values in {
        inputs: {
            "DEVICE": "cpu",
            "POOL": 1 << 18,
            "POSITIONS": 512,
            "TABLE": (16, 1200),
            "count_sets": lambda nbytes: 2,
        },
        harness: {"ceiling": lambda: 9.0},
        timing: {
            "device_us": timed,
            "host_us": untimed,
            "capture": lambda call: None,
            "wall_gbs": lambda calls, nbytes, rounds: dict.fromkeys(calls, 1.0),
        },
        bookkeeping: {"SIZES": (1, 3), "BLOCK_SIZES": (1, 5), "BLOCK_KEYS": (40,), "FREE": 400},
        kv_write: {"SIZES": (1, 5), "HEADS": (4, 2, 32), "MLA": (2, 64, 32)},
        kv_copy: {"HEADS": (4, 2, 32), "LAYERS": 2},
        hicache: {
            "SLOTS": 64,
            "FEW": 16,
            "MANY": 32,
            "KINDS": {"mha": (2, (2, 8), 2), "mla": (2, (1, 24), 1)},
            "pinned_bytes": lambda n: torch.empty(n, dtype=torch.uint8, device="cpu"),
        },
        rope: {
            "HEADS": (4, 2, 32),
            "MLA": (2, 64, 32),
            "SHAPES": {"llama3-8b": (4, 2, 32)},
            "TOKENS": {"llama3-8b": (1, 5)},
            "TOKENS_E4M3": {"llama3-8b": (5,)},
        },
        attention: {
            "HEADS": (2, 1, 16),
            "DECODE": ((2, 20, 1.15),),
            "BEYOND": (((2, 1, 16), torch.float8_e4m3fn, 2, 20),),
            "EXTEND": ((2, 5, 12),),
            "SHORT": (),
            "FEW": (),
            "MIXED_EXTEND": ((2, ((1, 40), (1, 9))),),
            "OVER_FP8": (((2, 1, 16), 2, 5, 12),),
            "HOPPER": (((2, 1, 16, 32), (2, 5, 12)),),
            "PROMPTS": (((2, 2, 16, 32), (2, 5, 12)),),
        },
        pages: {"LEAST_PAGES": 8},
        models: {
            "MODELS": (models.Model("of windows", (2, 1, 16), 6), models.Model("of caps", (2, 1, 16), cap=0.5)),
            "DECODE": ((2, 20),),
            "EXTEND": ((2, 5, 17),),
        },
        launch: {"TOKENS": (2,)},
        mla: {
            "POINTS": ((2, 1, 40),),
            "FP8_POINTS": ((2, 1, 40),),
            "LEAST_PAGES": 8,
            "MIXED": (((1, 70), (1, 9)),),
            "MIXED_OF": (2,),
        },
        block_table: {"HEADS": (2, 1, 16), "PAGES": 64, "CACHED": 0, "BLOCK_SIZES": (1, 3), "BLOCK_KEYS": (20,)},
        decode_attention: {"PER_SM": 1, "DEEP": {(256, 16): decode_attention.Deep((16, 64, 4, 4), 1, 0, 0)}, "FEW": 1},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    torch.manual_seed(0)
    return bench.tables_of("cuda")
