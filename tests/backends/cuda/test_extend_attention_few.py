"""extend_attention's kernel for a few tokens a request over fp8: of 17 to 32 rows, a token and query head each, and of
more query heads a key head than decode's kernel over fp8 takes.

Compiled: that it does not spill. On Hopper (``ci/h200``): what it computes. Which tile a program finds:
``test_tiles.py``; how parts of tiles are merged: ``test_merge.py``; which calls go where:
``test_extend_attention_tokens.py``.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import put_aside, serialized
from launched import launched, same_in_graphs

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.ops import get_spec

pytest.importorskip("triton", reason="Triton is not installed here")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BASE = {
    "head_dim": 128,
    "bs": 3,
    "longest": 8,
    "lengths": "full",
    "prefix": 1400,
    "slots": 9600,
    "q_heads": 8,
    "kv_heads": 2,
    "dtype": "bf16",
    "cache_dtype": "e4m3",
    "scales": "tensor",
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "e5m2-fp16": {"cache_dtype": "e5m2", "dtype": "fp16", "scales": "float", "lse": False},
    "slots-of-64-bits": {"index": "i64", "indptr": "i64"},
    "heads-of-64": {"head_dim": 64},
    "heads-of-64-e5m2": {"head_dim": 64, "cache_dtype": "e5m2", "lse": False},
    "narrower-values": {"v_head_dim": 64},
    "wider-values": {"head_dim": 64, "v_head_dim": 128, "index": "i64"},
    "group-of-1": {"q_heads": 2, "longest": 30},
    "group-of-7": {"q_heads": 14, "longest": 4, "cache": "paged", "cache_view": "pairs"},
    "group-of-12": {"q_heads": 24, "longest": 2},
    "group-of-16-one-token": {"q_heads": 32, "longest": 1},
    "group-of-32": {"q_heads": 64, "longest": 1, "cache": "paged"},
    "several-tiles": {"lengths": "ragged", "longest": 13, "bs": 40, "prefix": 900, "slots": 40000},
    "absent": {"values": "skip", "spare": 3, "longest": 7},
    "not-causal": {"causal": False},
    "loud": {"loud": 6.0},
    "cap": {"logit_cap": 3.0, "loud": 4.0},
    "window": {"sliding_window": 700},
    "window-of-few": {"head_dim": 64, "sliding_window": 60, "bs": 9},
    "window-of-one": {"sliding_window": 0},
    "window-of-all": {"sliding_window": 2**40, "index": "i64"},
    "window-absent-cap": {"sliding_window": 300, "values": "skip", "logit_cap": 5.0},
    "window-fewer-keys": {"sliding_window": 3, "prefix": -3, "bs": 40, "slots": 4000},
    "window-many-requests": {"head_dim": 64, "sliding_window": 300, "bs": 300, "prefix": 90, "slots": 40000},
    "window-edge": {"sliding_window": 30, "bs": 9, "values": "edge", "indptr_values": "edge", "prefix": 40},
    "no-prefix": {"prefix": 0},
    "fewer-keys": {"prefix": -6, "bs": 40, "slots": 4000},
    "many-requests": {"bs": 300, "prefix": 90, "slots": 40000},
    "whole": {"head_dim": 64, "bs": 1100, "prefix": 9, "slots": 20000},
    "edge": {"bs": 9, "values": "edge", "indptr_values": "edge", "prefix": 40},
    "extreme": {"bs": 9, "values": "extreme", "indptr_values": "extreme", "prefix": 6, "index": "i64"},
}
"""Several tiles of keys, several parts; tiles of tokens that are not full."""
SPEC = get_spec("extend_attention")


def made(form: str) -> dict[str, Any]:
    return SPEC.make(**{**BASE, **FORMS[form]})


@pytest.fixture(autouse=True)
def taken_whatever_is_sooner_done(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from hal.backends.cuda import _tokens, extend_attention

    for limit in ("FEW_KEYS", "FEW_LONG", "FEW_WINDOW"):
        monkeypatch.setattr(_tokens, limit, 0)
    extend_attention._plans.clear()
    yield
    extend_attention._plans.clear()


@pytest.mark.skipif(INTERPRETED, reason="records launches")
@pytest.mark.parametrize("form", FORMS)
def test_taken(form: str) -> None:
    assert launched(SPEC.name, made(form))[0].kernel.name == "extend_attention_few_kernel"


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", FORMS)
def test_right(form: str) -> None:
    from hal.backends.cuda import extend_attention

    execute(SPEC, made(form), DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda"))


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
def test_logits_that_grow_from_tile_to_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of some tiles outgrow what weights are measured by, so that all sums shrink each time. Parts are long."""
    from hal.backends.cuda import decode_attention, extend_attention

    monkeypatch.setattr(decode_attention, "_sms", lambda device: 1)
    args = made("plain")
    k = args["k_cache"].float()
    steps = torch.linspace(0.05, 1.0, len(k)).reshape(-1, *[1] * (k.ndim - 1))
    args["k_cache"] = (k.abs() * steps * 8).to(args["k_cache"].dtype)
    args["q"] = args["q"].abs()
    indices = args["kv_indices"]
    for begin, end in zip(args["kv_indptr"][:-1].tolist(), args["kv_indptr"][1:].tolist(), strict=True):
        indices[begin:end] = indices[begin:end].sort().values
    execute(SPEC, args, DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda"))


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", ["plain", "heads-of-64", "several-tiles"])
def test_the_same_in_graphs(form: str) -> None:
    from hal.backends.cuda import extend_attention

    args = made(form)
    args["out"] = torch.zeros(*args["q"].shape[:2], args["v_cache"].shape[-1], dtype=args["q"].dtype)
    same_in_graphs(extend_attention.extend_attention, args)


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("form", FORMS if os.environ.get("CI_ALL") else ("plain", "heads-of-64-e5m2"))
def test_no_form_spills_or_has_its_products_serialized(form: str, tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher(SPEC.name)(**made(form))
    found = next(call for call in calls if call[0].kernel.name == "extend_attention_few_kernel")
    compiled = inspect.compile_call(found, 90)
    _, spills, _ = inspect.resources(compiled.asm["cubin"])
    assert spills <= 8  # two words of two forms, outside of the loop
    assert not put_aside(compiled.asm["cubin"], tmp_path)
    assert 4 * (compiled.metadata.shared + 1024) <= 233_472  # so that four programs run at once
    assert not serialized(compiled.asm["ptx"], tmp_path)
