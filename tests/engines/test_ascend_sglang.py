"""Real SGLang on hal's Ascend kernels, lowered and run on a CPU: tokens as the reference's, every access traced.

Run by `ci/engines ascend_sglang`, where triton-ascend stands in place of triton. One process, `sglang_worker`, imports
SGLang and forks an engine a job.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.engines.sglang import vision

# transformers and SGLang import torchvision.
vision.declare_operators()

from engines import on_ascend, workers  # noqa: E402

OPS = set(
    """
    alloc_decode alloc_extend build_kv_indices compute_positions decode_attention extend_attention get_last_loc
    kv_write rope_kv_write write_req_to_token
    """.split()
)
# Steps of 16 tokens: a longer prompt comes in pieces.
SMALL = {"chunked_prefill_size": 16, "page_size": 16, "max_total_tokens": 512}


@functools.cache
def worker() -> workers.Worker:
    return on_ascend.start("sglang_worker.py", {"engine": SMALL}, HAL_ENGINES="sglang", OMP_NUM_THREADS="1")


@pytest.fixture(params=on_ascend.MODELS)
def pair(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """On Ascend and on the reference; a race, or an access outside an argument, would end its engine."""
    return [worker().result(f"{request.param}-{backend}") for backend in ("ascend", "reference")]


def test_tokens_are_the_references(pair: list[dict[str, Any]]) -> None:
    on_ascend.check_tokens(*pair)


def test_the_ascend_kernels_ran_and_nothing_else(pair: list[dict[str, Any]]) -> None:
    on_ascend.check_who_ran(*pair, OPS)


def test_every_access_was_traced(pair: list[dict[str, Any]]) -> None:
    # HAL_TRACE's file, which has the calls, is a second behind the last step.
    on_ascend.check_accesses(pair[0])


def test_a_kernel_that_writes_where_it_must_not_ends_the_engine() -> None:
    assert "error" in worker().outcome("faulty")
    assert "4 bytes past the end of dst" in worker().log("faulty")
    assert "AccessError" in worker().log("faulty")
