"""mla_kv_write: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.ops.kv_write import SPEC as KV_WRITE
from hal.ops.mla_kv_write import as_kv_write
from hal.ops.proofs.fresh import MANY, PAGES, SLOTS, TOKENS, Fresh, Wide, room_for
from hal.ops.proofs.inputs import (
    DTYPES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    arranged,
    floats,
    generator,
    odd_indices,
    refused,
    some_slots,
    spaced,
)
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.proofs.rope_kv_write import FP8_SAMPLES
from hal.ops.spec import Proof, Sample


def join_rows(cache: Tensor, lora: Want, rope: Want) -> Want:
    """What a cache of joint rows must hold, from what its parts must."""

    def whole(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], dim=-1).view(cache.shape)

    candidates = []
    for one, other in zip(lora.candidates, rope.candidates, strict=True):
        if one.slack is None and other.slack is None:
            candidates.append(Candidate(whole(one.value, other.value)))
            continue
        slack = [_host.zeros(c.value.shape).double() if c.slack is None else c.slack for c in (one, other)]
        candidates.append(Candidate(whole(one.value.double(), other.value.double()), whole(*slack)))
    return Want(whole(lora.named, rope.named), tuple(candidates))


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    want = KV_WRITE.oracle(as_kv_write(a))
    return {"kv_cache": join_rows(a["kv_cache"], want["v_cache"], want["k_cache"])}


def make_rows(
    g: torch.Generator, n: int, lora_dim: int, rope_dim: int, dtype: torch.dtype, view: str, specials: bool
) -> tuple[Tensor, Tensor]:
    """kv_lora and k_rope. view: ``separate``, ``fused`` (views of one projection), ``misaligned`` (off a 16-byte
    boundary), ``heads`` (with a head dim of 1)."""
    parts = arranged([floats(g, (n, d), dtype, specials) for d in (lora_dim, rope_dim)], view)
    lora, rope = (p.unsqueeze(1) for p in parts) if view == "heads" else parts
    return lora, rope


def make_cache(
    g: torch.Generator, form: str, slots: int, page_size: int, row: int, dtype: torch.dtype, view: str
) -> Tensor:
    """form: ``slots`` [S, row], ``paged`` [P, page, row], ``heads`` [S, 1, row], ``paged-heads`` [P, page, 1, row].
    view: ``plain``; ``padded`` (odd strides); ``far`` (slots 2^29 elements apart)."""
    lead = (slots // page_size, page_size) if form.startswith("paged") else (slots,)
    shape = (*lead, 1, row) if form.endswith("heads") else (*lead, row)
    return spaced(_host.randn(shape, generator=g).clamp(-4, 4).to(dtype), view)


def make_scale(kind: str) -> float | Tensor | None:
    """``none``, ``float``, ``tensor``."""
    return {"none": None, "float": 0.37, "tensor": _host.tensor([2.25])}[kind]


def make(
    seed: int = 0,
    n: int = 5,
    lora_dim: int = 128,
    rope_dim: int = 64,
    dtype: str = "bf16",
    slot: str = "i64",
    cache: str = "slots",
    slots: int = 48,
    page_size: int = 16,
    cache_dtype: str | None = None,
    cache_view: str = "plain",
    rows: str = "separate",
    scale: str = "none",
    values: str = "valid",
    specials: bool = False,
) -> dict[str, Any]:
    g, kind = generator(seed), FLOAT_DTYPES[cache_dtype or dtype]
    kv_lora, k_rope = make_rows(g, n, lora_dim, rope_dim, FLOAT_DTYPES[dtype], rows, specials)
    return {
        "kv_lora": kv_lora,
        "k_rope": k_rope,
        "kv_cache": make_cache(g, cache, slots, page_size, lora_dim + rope_dim, kind, cache_view),
        "slots": odd_indices(some_slots(g, n, slots), slots, values, INDEX_DTYPES[slot]),
        "kv_scale": make_scale(scale),
    }


_bad, _bad_fp8 = refused(make, n=3, slots=32), refused(make, cache_dtype="e4m3")


_BF16 = torch.bfloat16


FORMS = ("slots", "paged", "heads", "paged-heads")


DEEPSEEK = {"lora_dim": 512, "rope_dim": 64}


_FEW = {"lora_dim": 64, "rope_dim": 32}


FRESH_ROWS = {
    "n": Wide(TOKENS, {**_FEW, "slots": room_for("n")}),
    "slots": Wide(SLOTS, {**_FEW, "n": MANY}, PAGES),
    "page_size": Wide([64, 128, 256], {"cache": ["paged", "paged-heads"], "slots": 1024, "n": MANY}),
}


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{d}", {"dtype": d}) for d in DTYPES),
        *(Sample(f"deepseek-{form}", {**DEEPSEEK, "n": 3, "cache": form}) for form in FORMS),
        Sample("i32", {"slot": "i32", "n": 9}),
        Sample("one", {"n": 1}),
        Sample("empty", {"n": 0}, control="one"),
        Sample("all-skipped", {"n": 9, "values": "none"}, control="one"),
        Sample("no-slots", {"slots": 0, "values": "none"}, control="one"),
        Sample("past-one-block", {"n": 700, "slots": 1024, "lora_dim": 64}),
        *(Sample(f"paged-{p}", {"cache": "paged", "page_size": p, "n": 20}) for p in (1, 3, 16)),
        *(Sample(f"{form}-padded", {"cache": form, "cache_view": "padded", "n": 9}) for form in FORMS),
        *(Sample(f"{r}-{d}", {"rows": r, "dtype": d, "n": 6}) for r in ("fused", "misaligned") for d in DTYPES),
        Sample("rows-with-a-head", {"rows": "heads", "cache": "heads"}),
        Sample("odd-dims", {"lora_dim": 96, "rope_dim": 32}),
        Sample("skip", {"n": 21, "values": "skip"}),
        Sample("edge", {"n": 25, "values": "edge"}),
        Sample("extreme", {"n": 31, "values": "extreme", "cache": "paged"}),
        Sample("extreme-i32", {"n": 31, "values": "extreme", "slot": "i32"}),
        Sample("equal-slots", {"n": 6, "values": "equal"}),
        *(Sample(f"specials-{d}", {"dtype": d, "specials": True, "n": 9}) for d in DTYPES),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "n": 6}, large=True),
        *FP8_SAMPLES,
        Sample(
            "e4m3-deepseek",
            {**DEEPSEEK, "cache_dtype": "e4m3", "cache": "paged", "scale": "float", "n": 20},
            "feature:fp8_e4m3",
        ),
    ),
    errors=(
        _bad("lora-fp64", kv_lora=lambda: _host.zeros(3, 128, dtype=torch.float64)),
        _bad("lora-two-heads", kv_lora=lambda: _host.zeros(3, 2, 128, dtype=_BF16)),
        _bad("lora-strided", kv_lora=lambda: _host.zeros(3, 256, dtype=_BF16)[:, ::2]),
        _bad("rope-none", k_rope=None),
        _bad("rope-other-dtype", k_rope=lambda: _host.zeros(3, 64)),
        _bad("rope-fewer-tokens", k_rope=lambda: _host.zeros(2, 64, dtype=_BF16)),
        _bad("cache-other-dtype", kv_cache=lambda: _host.zeros(32, 192)),
        _bad("cache-none", kv_cache=None),
        _bad("cache-other-row", kv_cache=lambda: _host.zeros(32, 128, dtype=_BF16)),
        _bad("cache-two-heads", kv_cache=lambda: _host.zeros(2, 16, 2, 192, dtype=_BF16)),
        _bad("cache-expanded", kv_cache=lambda: _host.zeros(1, 192, dtype=_BF16).expand(32, 192)),
        _bad("slots-too-many", slots=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("slots-float", slots=lambda: _host.zeros(3)),
        _bad("scale-without-fp8", kv_scale=0.5),
        _bad_fp8("scale-of-two", kv_scale=lambda: _host.ones(2)),
        _bad_fp8("scale-zero", kv_scale=0.0),
    ),
    ragged={
        "n": (0, 80),
        "lora_dim": [64, 128],
        "rope_dim": [32, 64],
        "dtype": DTYPES,
        "slot": ("i32", "i64"),
        "cache": FORMS,
        "page_size": [1, 3, 16],
        "slots": (96, 96),
        "cache_view": ("plain", "padded"),
        "rows": ("separate", "fused", "misaligned", "heads"),
        "values": ("valid", "skip", "edge", "extreme"),
    },
    fresh=Fresh(FRESH_ROWS, lambda p: (p["n"] + p["slots"]) * (p["lora_dim"] + p["rope_dim"]), {"n": (9, 40)}),
)
