"""Real SGLang on hal in two processes, tensor parallel by its own launcher, with HiCache too.

Run by `ci/scale`, in SGLang's environment. `engines/sglang_worker.py` forks an engine a job.
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

# transformers and SGLang import torchvision, with hal off too.
vision.declare_operators()

from engines import vllm_models, workers  # noqa: E402
from scale import rounds  # noqa: E402

STEP = set(
    """
    build_kv_indices write_req_to_token compute_positions decode_attention extend_attention rope_kv_write
    alloc_extend alloc_decode get_last_loc kv_write kv_transfer
    """.split()
)


@functools.cache
def jobs() -> dict[str, dict[str, Any]]:
    """What is run, by name."""
    model = str(vllm_models.tiny_model("llama-gqa"))
    cores = sorted(os.sched_getaffinity(0))
    made: dict[str, dict[str, Any]] = {
        "one": {"model": model, "rounds": [rounds.prompts()]},
        # One start of two processes for both questions.
        "two": {
            "model": model,
            "rounds": [rounds.prompts(), *rounds.evicted()],
            "engine": {
                "tp_size": 2,
                "enable_hierarchical_cache": True,
                "hicache_ratio": 4.0,
                "max_total_tokens": 320,
                "hicache_mem_layout": "page_head",
                "hicache_io_backend": "kernel",
            },
        },
    }
    for name, job in made.items():
        job["name"] = name
        if "engine" in job:
            # SGLang gives each process a NUMA node of its own, where there are as many.
            job["env"] = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    return made


@functools.cache
def worker() -> workers.Worker:
    path = vllm_models.folder() / "scale-sglang"
    path.mkdir()
    environment = workers.environment(HAL_ENGINES="sglang", HAL_BACKEND="cpu", OMP_NUM_THREADS="1")
    return workers.Worker("sglang_worker.py", path, jobs(), environment)


def result(job: str) -> dict[str, Any]:
    return worker().result(job)


def tokens(job: str) -> list[list[list[int]]]:
    return [r["tokens"] for r in result(job)["rounds"]]


@pytest.mark.parametrize("job", ["one", "two"])
def test_tokens_are_transformers(job: str) -> None:
    worker()  # it works while transformers does
    given = jobs()[job]
    assert tokens(job) == [vllm_models.generate(given["model"], p, 12) for p in given["rounds"]]


def test_tokens_of_two_processes_are_those_of_one() -> None:
    assert tokens("two")[0] == tokens("one")[0]


def test_hal_ran_every_op_in_both_processes() -> None:
    result("two")
    found = rounds.processes(worker().folder / "two.trace")
    assert len(found) == 2, found
    for ops in found.values():
        assert ops == {op: {"cpu"} for op in STEP}


def test_an_evicted_prefix_comes_back_from_the_host_of_each() -> None:
    assert [r["cached"] for r in result("two")["rounds"]] == [[0] * 8, [0], [0], [0], [160]]
