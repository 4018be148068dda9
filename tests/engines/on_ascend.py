"""What the tests of an engine on Ascend's lowered kernels share: tiny models on the Ascend kernels, the same on hal's
reference, and last a kernel that writes where it must not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from engines import vllm_models, workers

from hal.lowered import missing

if missing():
    pytest.skip(f"not the lowered lane: {missing()}", allow_module_level=True)

LAYERS = 2
MODELS = {"llama": 199, "smollm2": 49152} if os.environ.get("CI_ALL") else {"llama": 199}
"""Sizes of vocabularies. The second is another model by the same calls: `ci/test all`."""


def rounds(vocab: int) -> list[list[list[int]]]:
    """A prompt of three steps; then one that begins with it, one with its half, and one of three tokens."""
    g = torch.Generator().manual_seed(3)
    first, *others = (torch.randint(1, vocab, (n,), generator=g).tolist() for n in (40, 5, 9, 3))
    return [[first], [first + others[0], first[:20] + others[1], others[2]]]


def start(worker: str, settings: dict[str, Any], **environment: str) -> workers.Worker:
    """Who runs all jobs; `settings` by the name that it has for them."""
    paths = {"llama": lambda: vllm_models.tiny_model("llama-gqa"), "smollm2": lambda: vllm_models.cut_smollm2(LAYERS)}
    jobs = [
        {
            "name": f"{model}-{backend}",
            "model": str(paths[model]()),
            "rounds": rounds(vocab),
            "new": 4,
            "env": {"HAL_BACKEND": backend},
            **settings,
        }
        for backend in ("ascend", "reference")
        for model, vocab in MODELS.items()
    ]
    jobs.append({**jobs[0], "name": "faulty", "rounds": [[[5, 6, 7]]], "fault": "extend_attention"})
    path = vllm_models.folder() / "ascend"
    path.mkdir()
    given = workers.environment(HAL_LANE="lowered", HAL_BACKEND="ascend", **environment)
    return workers.Worker(worker, path, {job["name"]: job for job in jobs}, given)


def check_tokens(ascend: dict[str, Any], reference: dict[str, Any]) -> None:
    assert ascend["rounds"] == reference["rounds"]
    tokens = [t for found in ascend["rounds"] for t in found["tokens"]]
    assert [len(t) for t in tokens] == [4] * 4
    assert len(set(map(tuple, tokens))) > 2
    # What was there of the first prompt was not computed again.
    assert ascend["rounds"][1]["cached"] == [32, 16, 0]


def check_who_ran(ascend: dict[str, Any], reference: dict[str, Any], ops: set[str]) -> None:
    assert ascend["trace"].keys() == reference["trace"].keys() == ops
    for op, by in ascend["trace"].items():
        assert by.keys() == {"ascend (lowered)"}, op
        assert reference["trace"][op].keys() == {"reference"}, op
    assert reference["kernels"] == {}


def check_accesses(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By op: its calls, and the kernels that it started; every one of those was traced."""
    calls = {op: by["ascend (lowered)"] for op, by in found["trace"].items()}
    kernels = {name.strip("_"): seen for name, seen in found["kernels"].items()}
    counts = {}
    for op in ("kv_write", "rope_kv_write", "extend_attention", "decode_attention"):
        started, accesses = kernels[op]
        counts[op] = calls[op], started
        assert started >= calls[op] > LAYERS, op
        # Two reads and a write of each token, at the least.
        assert accesses >= 3 * started, op
    # 44 tokens are more than two steps take.
    assert calls["extend_attention"] >= 3 * LAYERS
    return counts
