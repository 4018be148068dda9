"""Real SGLang on hal's Ascend kernels, lowered and run on a CPU: tokens as the reference's, every access traced.

Run by `ci/engines ascend_sglang`, where triton-ascend stands in place of triton. One process, `sglang_worker`, imports
SGLang and forks an engine a job: tiny models on the Ascend kernels, the same on hal's reference, and last a kernel that
writes where it must not.
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
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.lowered import missing

if missing():
    pytest.skip(f"not the lowered lane: {missing()}", allow_module_level=True)

from hal.engines.sglang import vision

# transformers and SGLang import torchvision.
vision.declare_operators()

from engines import vllm_models  # noqa: E402

HERE = Path(__file__).parent
OPS = {
    "alloc_decode", "alloc_extend", "build_kv_indices", "compute_positions", "decode_attention", "extend_attention",
    "get_last_loc", "kv_write", "rope_kv_write", "write_req_to_token",
}  # fmt: skip
LAYERS = 2
SMALL = {"chunked_prefill_size": 16, "page_size": 16, "max_total_tokens": 512}
"""Steps of 16 tokens: a longer prompt comes in pieces."""
MODELS = ("llama", "smollm2")


def rounds(vocab: int) -> list[list[list[int]]]:
    """A prompt of three steps; then one that begins with it, one with its half, and one of three tokens."""
    g = torch.Generator().manual_seed(3)
    first, *others = (torch.randint(1, vocab, (n,), generator=g).tolist() for n in (40, 5, 9, 3))
    return [[first], [first + others[0], first[:20] + others[1], others[2]]]


@functools.cache
def folder() -> Path:
    """Where all jobs have run."""
    llama, smollm2 = vllm_models.tiny_model("llama-gqa"), vllm_models.cut_smollm2(LAYERS)
    jobs = [
        {
            "name": f"{model}-{backend}", "model": str(path), "rounds": rounds(vocab), "new": 4, "engine": SMALL,
            "env": {"HAL_BACKEND": backend},
        }
        for backend in ("ascend", "reference")
        for model, path, vocab in (("llama", llama, 199), ("smollm2", smollm2, 49152))
    ]  # fmt: skip
    jobs.append({**jobs[0], "name": "faulty", "rounds": [[[5, 6, 7]]], "fault": "extend_attention"})
    path = vllm_models.folder() / "ascend"
    path.mkdir(exist_ok=True)
    (path / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HAL_") or k == "HAL_CACHE_DIR"},
        "HAL_ENGINES": "sglang", "OMP_NUM_THREADS": "1", "HAL_LANE": "lowered", "HAL_BACKEND": "ascend",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, HERE / "sglang_worker.py", path / "jobs.json", path],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert not ran.returncode, ran.stdout[-4000:]
    return path


def log(job: str) -> str:
    """What SGLang said in a job."""
    return (folder() / f"{job}.log").read_text()


def result(job: str) -> dict[str, Any]:
    """Of a job that is to succeed: a race, or an access outside an argument, would end its engine."""
    found = json.loads((folder() / f"{job}.json").read_text())
    assert "error" not in found, found.get("traceback", "") + log(job)[-4000:]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_the_references(model: str) -> None:
    ascend, reference = result(f"{model}-ascend"), result(f"{model}-reference")
    assert ascend["rounds"] == reference["rounds"]
    tokens = [t for found in ascend["rounds"] for t in found["tokens"]]
    assert [len(t) for t in tokens] == [4] * 4
    assert len(set(map(tuple, tokens))) > 2
    # What was there of the first prompt was not computed again.
    assert ascend["rounds"][1]["cached"] == [32, 16, 0]


@pytest.mark.parametrize("model", MODELS)
def test_the_ascend_kernels_ran_and_nothing_else(model: str) -> None:
    ascend, reference = result(f"{model}-ascend"), result(f"{model}-reference")
    assert ascend["trace"].keys() == reference["trace"].keys() == OPS
    for op, by in ascend["trace"].items():
        assert by.keys() == {"ascend (lowered)"}, op
        assert reference["trace"][op].keys() == {"reference"}, op
    assert reference["kernels"] == {}


@pytest.mark.parametrize("model", MODELS)
def test_every_access_was_traced(model: str) -> None:
    found = result(f"{model}-ascend")
    calls = {op: by["ascend (lowered)"] for op, by in found["trace"].items()}
    started = {name.strip("_"): count for name, (count, _) in found["kernels"].items()}
    accesses = {name.strip("_"): seen for name, (_, seen) in found["kernels"].items()}
    # HAL_TRACE's file is a second behind the last step.
    for op in ("kv_write", "rope_kv_write", "extend_attention", "decode_attention"):
        assert started[op] >= calls[op] > LAYERS, op
        # Two reads and a write of each token, at the least.
        assert accesses[op] >= 3 * started[op], op
    # 44 tokens are more than two steps take.
    assert calls["extend_attention"] >= 3 * LAYERS


def test_a_kernel_that_writes_where_it_must_not_ends_the_engine() -> None:
    assert "error" in json.loads((folder() / "faulty.json").read_text())
    assert "4 bytes past the end of dst" in log("faulty")
    assert "AccessError" in log("faulty")
