"""decode_attention over fp8 caches: products in fp16, by Triton anywhere and by two Gluon kernels on Hopper.

Under TRITON_INTERPRET=1: what the Triton kernel computes of queries that fp16 does not hold. Without a GPU: which calls
the Gluon kernels take, and that their forms don't spill. On Hopper (``ci/h200``): what they compute.
"""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import serialized

from hal.ops import get_spec
from hal.ops.proofs.judge import right_any

pytest.importorskip("triton", reason="Triton is not installed here")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
USUAL = {
    "bs": 5,
    "longest": 900,
    "slots": 4800,
    "head_dim": 128,
    "kv_heads": 8,
    "q_heads": 32,
    "cache_dtype": "e4m3",
    "dtype": "bf16",
}
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"cache_dtype": "e5m2", "lse": False},
    {"dtype": "fp16", "scales": "float", "index": "i64"},
    {"scales": "tensor", "sliding_window": 70, "indptr": "i64"},
    {"logit_cap": 3.0, "values": "skip"},
    {"cache": "paged", "cache_view": "pairs", "values": "skip"},
    {"q_heads": 6, "kv_heads": 1, "bs": 40, "longest": 110},
    {"q_heads": 9, "kv_heads": 3, "head_dim": 64, "bs": 300, "longest": 15},
    {"q_heads": 16, "head_dim": 256, "cache_dtype": "e5m2"},
    {"head_dim": 128, "v_head_dim": 64, "bs": 3, "longest": 2500, "slots": 8000},
)
MLA = {"kv_heads": 1, "q_heads": 128, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared"}
LATENT: tuple[dict[str, Any], ...] = (
    {"scales": "tensor", "bs": 2, "longest": 300},
    {"cache_dtype": "e5m2", "q_heads": 16, "dtype": "fp16", "scales": "float", "indptr": "i64", "lse": False},
    {"q_heads": 24, "values": "skip", "index": "i64", "longest": 300},
    {"q_heads": 20, "cache": "paged", "scales": "float"},
    {"cache_dtype": "e5m2", "q_heads": 64, "bs": 40, "longest": 90},
    {"q_heads": 8, "bs": 3, "longest": 2500, "slots": 8000, "scales": "float"},
    {"q_heads": 32, "cache_dtype": "e5m2", "bs": 3, "longest": 700, "slots": 2200},
    {"q_heads": 1, "bs": 40, "longest": 90},
    {"bs": 70, "longest": 1500, "lengths": "skewed", "slots": 20000},
    {"q_heads": 16, "bs": 128, "longest": 4000, "lengths": "skewed", "slots": 20000, "scales": "float"},
)
"""Rows of 576 that are keys and values at once: several tiles, several parts, a last tile that is not full."""
LOUD = {"3e38": (3e38, 1e-38), "1e-38": (1e-38, 1e38), "1e-40": (1e-40, 1e38), "3e4": (3e4, 1e-4), "1": (1.0, 0.1)}
"""Queries of a magnitude, and a scale by which logits are of none."""


def made(**change: Any) -> dict[str, Any]:
    return get_spec("decode_attention").make(**{**USUAL, **change})


def extreme(cache_dtype: str, loud: str, **change: Any) -> dict[str, Any]:
    """Heads of one magnitude, of one element, of two and little ones, of zeros; and one NaN."""
    size, scale = LOUD[loud]
    args = made(cache_dtype=cache_dtype, scales="tensor", **change)
    q = torch.rand(args["q"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
    q[:, 0] = 0
    q[:, 1, 1:] = 0
    q[:, 2, 2:] *= 2.0**-30
    q[-1, 0, 3] = torch.nan
    args["q"] = (q * size).to(args["q"].dtype)
    return args | {"scale": scale}


def kernels(args: dict[str, Any], arch: int = 90) -> list[str]:
    from hal.backends.cuda import inspect

    with inspect.record(arch) as calls:
        inspect.launcher("decode_attention")(**args)
    return list(dict.fromkeys(bound.kernel.name for bound, _ in calls))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("loud", LOUD)
@pytest.mark.parametrize("cache_dtype", ["e4m3", "e5m2"])
def test_queries_that_fp16_does_not_hold(cache_dtype: str, loud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cuda import decode_attention as module

    monkeypatch.setattr(module, "PER_SM", Fraction(1, 4))
    decode_attention = module.decode_attention
    small = {"bs": 2, "longest": 12, "lengths": "full", "slots": 60, "kv_heads": 1, "q_heads": 4, "head_dim": 64}
    args = extreme(cache_dtype, loud, **small)
    wants = get_spec("decode_attention").oracle(args)
    assert bool(wants["lse"].candidates[0].value.isnan().any())
    result = decode_attention(**args)
    assert bool(right_any(result, wants["return"]).all())
    assert bool(right_any(args["lse"], wants["lse"]).all())
    args["q"][0, 3, 5], args["q"][1, 1, 5] = torch.inf, -torch.inf
    result = decode_attention(**args)
    assert bool(result[0, 3].isnan().all() and result[1, 1].isnan().all() and result[0, :3].isfinite().all())


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", [*FORMS, *LOUD], ids=str)
def test_right(form: dict[str, Any] | str) -> None:
    args = [made(**form)] if isinstance(form, dict) else [extreme(c, form) for c in ("e4m3", "e5m2")]
    assert judged(*args) == {"decode_attention_lanes_kernel"}


def judged(*calls: dict[str, Any]) -> set[str]:
    """Within the contract's bound, by which kernels."""
    from hal.backends.cuda import decode_attention
    from hal.bench.judge import verdict

    decode_attention._plans.clear()
    assert max(verdict("decode_attention", args) for args in calls) <= 1.0
    return {plan.steps[0].run.kernel.name for plan in decode_attention._plans.values()}


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", [*LATENT, *LOUD], ids=str)
def test_latent_rows_are_right(form: dict[str, Any] | str) -> None:
    if isinstance(form, dict):
        args = [made(**MLA | form)]
    else:
        args = [extreme(c, form, **{**MLA, "q_heads": 8, "longest": 300}) for c in ("e4m3", "e5m2")]
        args.append(args[0] | {"k_scale": torch.tensor([-0.37])})
    assert judged(*args) == {"decode_attention_hopper_kernel"}


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_few_heads_whose_logits_outgrow_what_they_are_measured_by(scale: float) -> None:
    args = made(**MLA | {"q_heads": 16, "bs": 3, "longest": 2500, "slots": 8000}) | {"scale": scale}
    assert judged(args) == {"decode_attention_hopper_kernel"}


def test_taken_on_hopper_alone() -> None:
    for form, name in (*((f, "lanes") for f in FORMS), *((MLA | f, "hopper") for f in LATENT[1:4])):
        args = made(**form)
        assert kernels(args) == [f"decode_attention_{name}_kernel", "merge_kernel"]
        for arch in (80, 100):
            assert kernels(args, arch) == ["decode_attention_kernel", "merge_kernel"]


def test_latent_rows_of_no_whole_16_bytes_go_to_triton() -> None:
    args = made(**MLA)
    wide = torch.zeros(*args["k_cache"].shape[:-1], 584, dtype=args["k_cache"].dtype, device="cpu")
    args |= {"k_cache": wide[..., :576], "v_cache": wide[..., :512]}
    assert kernels(args)[0] == "decode_attention_kernel"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp32"},
        {"cache_dtype": None},
        {"head_dim": 96},
        {"q_heads": 9, "kv_heads": 1},
        {"cache": "paged", "cache_view": "padded"},
        {"scale": -0.1},
    ],
    ids=str,
)
def test_other_calls_go_to_triton(change: dict[str, Any]) -> None:
    scale = {"scale": change["scale"]} if "scale" in change else {}
    args = made(**{k: v for k, v in change.items() if k != "scale"}) | scale
    assert kernels(args)[0] == "decode_attention_kernel"


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("form", [FORMS[i] for i in ((0, 4, 5, 8) if os.environ.get("CI_ALL") else (4, 8))], ids=str)
def test_no_form_spills(form: dict[str, Any]) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("decode_attention")(**made(**form))
    assert calls[0][0].kernel.name == "decode_attention_lanes_kernel"
    cubin = inspect.compile_call(calls[0], 90).asm["cubin"]
    assert inspect.resources(cubin)[1] == 0
    assert inspect.widest_load(inspect.sass(cubin)) == 128


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("form", [LATENT[i] for i in ((0, 1, 3) if os.environ.get("CI_ALL") else (0, 3))], ids=str)
def test_no_form_of_latent_rows_spills_or_has_its_products_serialized(form: dict[str, Any], tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("decode_attention")(**made(**MLA | form))
    assert calls[0][0].kernel.name == "decode_attention_hopper_kernel"
    compiled = inspect.compile_call(calls[0], 90)
    _, spills, _ = inspect.resources(compiled.asm["cubin"])
    assert spills == 0
    assert compiled.metadata.shared <= 232_448
    assert inspect.widest_load(inspect.sass(compiled.asm["cubin"])) == 128
    assert not serialized(compiled.asm["ptx"], tmp_path)
