"""Real SGLang on an emulated NPU: its own path for NPUs, hal's Ascend kernels, tokens as transformers' on a CPU.

Run by `ci/engines ascend_sglang`. The worker alone has the emulated torch_npu (`tests/emulated`) on its path; one
process imports SGLang and forks an engine a job. Emulated: docs/ascend.md says what that proves and what not.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.engines.sglang import vision

# transformers and SGLang import torchvision.
vision.declare_operators()

from engines import on_ascend, vllm_models, workers  # noqa: E402

HERE = Path(__file__).parent
EMULATED = HERE.parent / "emulated/site"
SMALL = {"device": "npu", "chunked_prefill_size": 16, "page_size": 16, "max_total_tokens": 512}
STEP = set(
    """
    alloc_decode alloc_extend build_kv_indices compute_positions decode_attention extend_attention get_last_loc
    kv_write write_req_to_token
    """.split()
)
# Qwen3's norm and rotation are one name of sgl-kernel-npu's; Llama's rotation is in decode steps, else SGLang's own.
RAN = {"llama-gqa": {*STEP, "rope_kv_write"}, "qwen3-qk-norm": {*STEP, "qk_norm_rope_kv_write"}}
REFUSED = {
    "two-npus": ({"tp_size": 2}, "on an NPU tensor parallelism (--tp-size 2)"),
    "other-attention": ({"attention_backend": "ascend"}, "--attention-backend ascend: all attention is hal's"),
}
ANOTHER = "stablelm-partial-rotary"


@functools.cache
def worker() -> workers.Worker:
    rounds = on_ascend.rounds(199)
    jobs: dict[str, dict[str, Any]] = {
        name: {"model": str(vllm_models.tiny_model(name)), "rounds": rounds, "new": 4, "engine": SMALL} for name in RAN
    }
    short = {**jobs["llama-gqa"], "rounds": [[[5, 6, 7]]]}
    jobs |= {name: {**short, "engine": {**SMALL, **more}} for name, (more, _) in REFUSED.items()}
    jobs[ANOTHER] = {**short, "model": str(vllm_models.tiny_model(ANOTHER))}
    jobs["faulty"] = {**short, "fault": "extend_attention"}
    path = vllm_models.folder() / "npu"
    path.mkdir()
    environment = workers.environment(HAL_ENGINES="sglang", OMP_NUM_THREADS="1", PYTHONPATH=str(EMULATED))
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return workers.Worker("sglang_worker.py", path, jobs, environment)


@pytest.mark.parametrize("model", RAN)
def test_tokens_are_transformers(model: str) -> None:
    found = worker().result(model)
    path, rounds = str(vllm_models.tiny_model(model)), on_ascend.rounds(199)
    assert [r["tokens"] for r in found["rounds"]] == [vllm_models.generate(path, prompts, 4) for prompts in rounds]
    # What was there of the first prompt was not computed again; steps overlap, on streams of their own.
    assert [r["cached"] for r in found["rounds"]] == [[0], [32, 16, 0]]
    assert found["settings"] == {"attention_backend": "hal", "disable_overlap_schedule": False, "page_size": 16}


@pytest.mark.parametrize("model", RAN)
def test_the_ascend_kernels_ran_and_nothing_else(model: str) -> None:
    trace = worker().result(model)["trace"]
    assert trace.keys() == RAN[model]
    assert {by for found in trace.values() for by in found} == {"ascend"}


@pytest.mark.parametrize("job", REFUSED)
def test_settings_that_have_not_run_there_are_refused(job: str) -> None:
    error = worker().outcome(job)["error"]
    assert error.startswith("EngineError: hal: sglang can't run this on hal: ")
    assert REFUSED[job][1] in error


def test_a_model_that_has_not_run_there_is_refused() -> None:
    assert "error" in worker().outcome(ANOTHER)
    assert "hal: sglang can't run this on hal: on an NPU the model StableLmForCausalLM" in worker().log(ANOTHER)


def test_a_kernel_that_writes_where_it_must_not_ends_the_engine() -> None:
    assert "error" in worker().outcome("faulty")
    assert "4 bytes past the end of dst" in worker().log("faulty")
