"""Real SGLang on an emulated NPU: its own path for NPUs, hal's Ascend kernels, tokens as transformers' on a CPU.

Run by `ci/engines ascend_sglang`. The worker alone has the emulated torch_npu (`tests/emulated`) on its path; one
process imports SGLang and forks an engine a job. Emulated: docs/ascend.md says what that proves and what not.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.engines.sglang import vision

# transformers and SGLang import torchvision.
vision.declare_operators()

from engines import on_ascend, vllm_models  # noqa: E402

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
def folder() -> Path:
    """Where all jobs have run."""
    rounds = on_ascend.rounds(199)
    jobs: list[dict[str, Any]] = [
        {"name": name, "model": str(vllm_models.tiny_model(name)), "rounds": rounds, "new": 4, "engine": SMALL}
        for name in RAN
    ]
    short = {**jobs[0], "rounds": [[[5, 6, 7]]]}
    jobs += [{**short, "name": name, "engine": {**SMALL, **more}} for name, (more, _) in REFUSED.items()]
    jobs.append({**short, "name": ANOTHER, "model": str(vllm_models.tiny_model(ANOTHER))})
    jobs.append({**short, "name": "faulty", "fault": "extend_attention"})
    path = vllm_models.folder() / "npu"
    path.mkdir()
    (path / "jobs.json").write_text(json.dumps(jobs))
    usual = {k: v for k, v in os.environ.items() if not k.startswith("HAL_") or k == "HAL_CACHE_DIR"}
    usual.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    ran = subprocess.run(
        [sys.executable, HERE / "sglang_worker.py", path / "jobs.json", path],
        env={**usual, "HAL_ENGINES": "sglang", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EMULATED)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not ran.returncode, ran.stdout[-4000:]
    return path


def result(job: str) -> dict[str, Any]:
    return json.loads((folder() / f"{job}.json").read_text())


def log(job: str) -> str:
    """What SGLang said in a job."""
    return (folder() / f"{job}.log").read_text()


@pytest.mark.parametrize("model", RAN)
def test_tokens_are_transformers(model: str) -> None:
    found = result(model)
    assert "error" not in found, found.get("traceback", "") + log(model)[-4000:]
    path, rounds = str(vllm_models.tiny_model(model)), on_ascend.rounds(199)
    assert [r["tokens"] for r in found["rounds"]] == [vllm_models.generate(path, prompts, 4) for prompts in rounds]
    # What was there of the first prompt was not computed again; steps overlap, on streams of their own.
    assert [r["cached"] for r in found["rounds"]] == [[0], [32, 16, 0]]
    assert found["settings"] == {"attention_backend": "hal", "disable_overlap_schedule": False, "page_size": 16}


@pytest.mark.parametrize("model", RAN)
def test_the_ascend_kernels_ran_and_nothing_else(model: str) -> None:
    trace = result(model)["trace"]
    assert trace.keys() == RAN[model]
    assert {by for found in trace.values() for by in found} == {"ascend"}


@pytest.mark.parametrize("job", REFUSED)
def test_settings_that_have_not_run_there_are_refused(job: str) -> None:
    error = result(job)["error"]
    assert error.startswith("EngineError: hal: sglang can't run this on hal: ")
    assert REFUSED[job][1] in error


def test_a_model_that_has_not_run_there_is_refused() -> None:
    assert "error" in result(ANOTHER)
    assert "hal: sglang can't run this on hal: on an NPU the model StableLmForCausalLM" in log(ANOTHER)


def test_a_kernel_that_writes_where_it_must_not_ends_the_engine() -> None:
    assert "error" in result("faulty")
    assert "4 bytes past the end of dst" in log("faulty")
