"""What the tests of transformers on hal share: models, prompts, ways to generate, and hal as in a new process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

import hal  # noqa: E402
from hal.engines import _engine  # noqa: E402

if _engine.ENGINES["transformers"].obstacle():
    pytest.skip(_engine.ENGINES["transformers"].obstacle(), allow_module_level=True)

from engines import tiny  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

import hal.engines.transformers  # noqa: E402

transformers.utils.logging.set_verbosity_error()
LENGTHS = (3, 14, 1, 22, 9, 17, 5, 11)
NEW = 12
OPS = ("build_kv_indices", "decode_attention", "extend_attention", "kv_write", "assign_extend_cache_locs")


@pytest.fixture(autouse=True)
def counting(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """hal as in a new process, with its calls counted; one thread more or less changes no token."""
    monkeypatch.setenv("HAL_TRACE", "1")
    hal.reload()
    hal.trace(reset=True)
    yield
    hal.trace(reset=True)


def counts(backend: str | None = None) -> dict[str, int]:
    return {op: n for op in OPS if (n := hal.trace().count(op, backend))}


def prompts(lengths: tuple[int, ...] = LENGTHS, vocab: int = 199) -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab, (n,), generator=g).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long))
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, rows: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    batch = padded(rows)
    out = model.generate(**batch, max_new_tokens=new, do_sample=False, **options)
    return [row[batch["input_ids"].shape[1] :].tolist() for row in out]


def batched(model: Any, rows: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    """Continuous batching. An error in its thread is raised here."""
    asked = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    room = {"num_blocks": 64, "max_batch_tokens": 24, "page_size": 16, **options}
    out = model.generate_batch(
        rows, generation_config=asked, continuous_batching_config=ContinuousBatchingConfig(**room), progress_bar=False
    )
    errors = {r.error for r in out.values() if r.error}
    assert not errors, errors
    return [out[name].generated_tokens for name in sorted(out, key=lambda n: int(n.rpartition("_")[2]))]


MADE: dict[str, tuple[Any, list[list[int]]]] = {}


def stock(shape: str) -> tuple[Any, list[list[int]]]:
    """A model on hal, with the tokens that transformers' own attention in plain torch gives."""
    if shape not in MADE:
        model = tiny.model(shape)
        model.set_attn_implementation("eager")
        MADE[shape] = model, generate(model, prompts())
    model, tokens = MADE[shape]
    model.set_attn_implementation("hal")
    return model, tokens
