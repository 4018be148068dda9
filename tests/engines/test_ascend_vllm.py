"""Real vLLM on hal's Ascend kernels, lowered and run on a CPU: tokens as the reference's, every access traced.

Run by `ci/engines ascend_vllm`, where triton-ascend stands in place of triton. One process, `vllm_worker`, runs all.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from engines import on_ascend, vllm_models, workers

OPS = {"build_kv_indices_from_blocks", "decode_attention", "extend_attention", "kv_write", "rope_kv_write"}
# Steps of 16 tokens: a longer prompt comes in pieces, beside requests that decode.
SMALL = {"max_num_batched_tokens": 16, "enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks_override": 20}


@functools.cache
def worker() -> workers.Worker:
    return on_ascend.start(
        "vllm_worker.py",
        {"llm": SMALL},
        **vllm_models.ENVIRONMENT,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HAL_TRACE="1",
        HAL_ENGINES="vllm",
    )


@pytest.fixture(params=on_ascend.MODELS)
def pair(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """On Ascend and on the reference; a race, or an access outside an argument, would be an error."""
    return [worker().result(f"{request.param}-{backend}") for backend in ("ascend", "reference")]


def test_tokens_are_the_references(pair: list[dict[str, Any]]) -> None:
    on_ascend.check_tokens(*pair)


def test_the_ascend_kernels_ran_and_nothing_else(pair: list[dict[str, Any]]) -> None:
    on_ascend.check_who_ran(*pair, OPS)
    for op, by in pair[0]["trace"].items():
        assert pair[1]["trace"][op]["reference"] == by["ascend (lowered)"], op


def test_every_access_was_traced(pair: list[dict[str, Any]]) -> None:
    # A call of an op with nothing to do starts no kernel; none of these is.
    assert all(calls == started for calls, started in on_ascend.check_accesses(pair[0]).values())


def test_a_kernel_that_writes_where_it_must_not_ends_the_engine() -> None:
    found = worker().outcome("faulty")
    assert "AccessError" in found["error"] + found["traceback"]
    assert "4 bytes past the end of dst" in found["error"] + found["traceback"]
