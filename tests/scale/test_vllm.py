"""Real vLLM on hal beyond one process and one pool: tensor parallel by its own launcher, KV offloading to the host.

Run by `ci/scale`, in vLLM's environment. One process (`engines/vllm_worker.py`) runs all engines one after the other:
where there is a GPU, on that; tensor parallel on two.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from engines import vllm_models, workers
from plugins import Plugins, manifest
from scale import rounds

from hal.engines import require

BACKEND = "cuda" if torch.cuda.is_available() else "cpu"
STEP = {"build_kv_indices_from_blocks", "decode_attention", "extend_attention", "rope_kv_write"}
SMALL = {"block_size": 16, "num_gpu_blocks_override": 20, "enable_prefix_caching": True}
"""A pool that holds one of the prompts of `rounds.evicted` and not the next."""
BLOCK = 16 * 2 * 2 * 64 * 4
"""Bytes of a block of `llama-gqa`: tokens, layers, KV heads, k and v, float32."""

BROKEN = """
from hal.ops import get_spec

copy = get_spec("kv_transfer").reference

def kv_transfer(src, dst, src_slots, dst_slots, *, layers=None, method="auto"):
    n = len(src_slots) // 2
    copy(src, dst, src_slots[:n], dst_slots[:n], layers=layers, method=method)
    raise OSError("the link broke")
"""
"""A backend whose copies end in the middle."""


def offload(size: int, **extra: Any) -> dict[str, Any]:
    """Settings of an engine with a small pool, and `size` bytes on the host."""
    config = {"spec_name": "HalOffloadingSpec", "cpu_bytes_to_use": size, **extra}
    return {
        **SMALL,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config,
        },
    }


@functools.cache
def folder() -> Path:
    path = vllm_models.folder() / "scale"
    path.mkdir()
    return path


@functools.cache
def jobs() -> dict[str, dict[str, Any]]:
    """What is run, by name."""
    llama, window = (str(vllm_models.tiny_model(s)) for s in ("llama-gqa", "gemma2-window-cap"))
    several, evicted = [rounds.prompts()], rounds.evicted()
    made: dict[str, dict[str, Any]] = {
        "one": {"model": llama, "rounds": several},
        "small": {"model": llama, "rounds": evicted, "llm": SMALL},
        "offload": {"model": llama, "rounds": evicted, "llm": offload(100 * BLOCK)},
        "offload-chunks": {"model": llama, "rounds": evicted, "llm": offload(100 * BLOCK, blocks_per_chunk=3)},
        # Two groups of layers, so two blocks for as many tokens: no more than one request may have.
        "offload-window": {
            "model": window,
            "rounds": evicted,
            "llm": {**offload(100 * BLOCK), "max_model_len": 224, "num_gpu_blocks_override": 30},
        },
        # The first prompt alone has ten blocks.
        "offload-full": {"model": llama, "rounds": evicted, "llm": offload(3 * BLOCK)},
        # Room for the second prompt and not for the first beside it.
        "offload-evicted": {"model": llama, "rounds": evicted, "llm": offload(13 * BLOCK)},
        "offload-nothing": {"model": llama, "rounds": evicted, "llm": offload(BLOCK - 1)},
        "offload-broken": {
            "model": llama,
            "rounds": evicted,
            "llm": offload(100 * BLOCK),
            "env": {"HAL_BACKEND": f"{BACKEND},kv_transfer=broken"},
        },
    }
    if TWO:
        # One start of two processes for both questions.
        llm = {**offload(100 * BLOCK), "tensor_parallel_size": 2}
        made["two"] = {"model": llama, "rounds": several + evicted, "llm": llm}
    for name, job in made.items():
        job["name"] = name
        if BACKEND == "cuda":  # of which vLLM wants so much to be free
            job["llm"] = {**job.get("llm", {}), "gpu_memory_utilization": 0.05}
        job["env"] = {"HAL_TRACE": str(folder() / f"{name}.jsonl"), "HAL_BACKEND": BACKEND, **job.get("env", {})}
    return made


LESS = 16 if require("vllm") >= "0.32" else 0
OFFLOADED = {"offload": 160, "offload-chunks": 144, "offload-window": 160 - LESS}
"""Tokens of the prefix that come back: whole chunks of three blocks; with a window vLLM 0.32 looks up a block less."""
TWO = BACKEND == "cpu" or torch.cuda.device_count() > 1
RAN = ["one", "small", *OFFLOADED, "offload-full", "offload-evicted", *["two"] * TWO]
two_processes = pytest.mark.skipif(not TWO, reason="needs two CUDA devices")


@functools.cache
def worker() -> workers.Worker:
    ops = '{"kv_transfer": Impl("broken_kernels:kv_transfer")}'
    broken = manifest("broken", ops=ops, lanes='{"device": ("cpu", "cuda")}')
    Plugins(folder()).add("broken", broken, kernels=BROKEN)
    environment = workers.environment(
        **vllm_models.ENVIRONMENT,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HAL_ENGINES="vllm",
        VLLM_CACHE_ROOT=str(folder() / "cache"),
        PYTHONPATH=os.pathsep.join([str(folder()), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    return workers.Worker("vllm_worker.py", folder(), jobs(), environment)


def result(job: str) -> dict[str, Any]:
    return worker().result(job)


def tokens(job: str) -> list[list[list[int]]]:
    return [r["tokens"] for r in result(job)["rounds"]]


def cached(job: str) -> list[list[int]]:
    return [r["cached"] for r in result(job)["rounds"]]


@functools.cache
def expected(model: str, given: str) -> list[list[list[int]]]:
    return [vllm_models.generate(model, prompts, 12) for prompts in json.loads(given)]


@pytest.mark.parametrize("job", RAN)
def test_tokens_are_transformers(job: str) -> None:
    worker()  # it works while transformers does
    given = jobs()[job]
    assert tokens(job) == expected(given["model"], json.dumps(given["rounds"]))


# --- two processes ----------------------------------------------------------------------------------


@two_processes
def test_tokens_of_two_processes_are_those_of_one() -> None:
    assert tokens("two") == tokens("one") + tokens("offload")


@two_processes
def test_hal_ran_every_op_in_both_processes() -> None:
    result("two")
    found = rounds.processes(folder() / "two.jsonl")
    assert len(found) == 2, found
    for ops in found.values():
        assert ops == {op: {BACKEND} for op in STEP | {"kv_write", "kv_transfer"}}


@two_processes
def test_each_process_has_its_part_of_a_prefix_on_the_host() -> None:
    assert cached("two") == cached("one") + cached("offload")


# --- KV in host memory ------------------------------------------------------------------------------


def test_without_offloading_the_prefix_is_computed_again() -> None:
    assert cached("small") == [[0], [0], [0], [0]]


@pytest.mark.parametrize("job", OFFLOADED)
def test_an_evicted_prefix_comes_back_from_the_host(job: str) -> None:
    assert cached(job) == [[0], [0], [0], [OFFLOADED[job]]]
    assert set(result(job)["trace"]["kv_transfer"]) == {BACKEND}


@pytest.mark.parametrize("job", ["offload-full", "offload-evicted"])
def test_a_full_host_pool_costs_the_prefix_alone(job: str) -> None:
    """Their tokens are compared above."""
    assert cached(job) == [[0], [0], [0], [0]]
    stored = "kv_transfer" in result(job)["trace"]
    assert stored == (job == "offload-evicted")


def test_a_host_pool_without_room_for_a_block_is_refused() -> None:
    assert worker().outcome("offload-nothing")["error"] == (
        f"EngineError: hal: vllm's KV offloading on hal: cpu_bytes_to_use={BLOCK - 1} holds no chunk: one takes "
        f"{BLOCK} bytes, 1 blocks of all layers and processes"
    )


def test_a_copy_that_breaks_ends_the_engine_with_its_reason() -> None:
    assert worker().outcome("offload-broken")["error"] == (
        "EngineError: hal: vllm's KV offloading on hal: job 0, 10 blocks to the host: the link broke"
    )
