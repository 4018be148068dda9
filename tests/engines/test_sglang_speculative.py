"""Speculative decoding in SGLang on hal: tokens as without it, drafts taken, hal's ops under their real callers.

Run by `ci/engines sglang`, one engine an algorithm.
"""

from __future__ import annotations

import atexit
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

from hal.engines.sglang import vision

vision.declare_operators()

from engines import drafts, vllm_models  # noqa: E402

HERE = Path(__file__).parent
STEPS, NEW = 3, 24
DRAFTED = {
    "speculative_eagle_topk": 1, "speculative_num_steps": STEPS, "speculative_num_draft_tokens": STEPS + 1,
    "page_size": 16,
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "ngram": {
        "speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1, "speculative_num_draft_tokens": 5,
        "page_size": 1,
    },
    "standalone": {"speculative_algorithm": "STANDALONE", **DRAFTED},
    "eagle": {"speculative_algorithm": "EAGLE", **DRAFTED},
}  # fmt: skip
EVERY = {
    "assign_extend_cache_locs", "build_kv_indices", "compute_positions", "extend_attention", "kv_write",
    "rope_kv_write", "write_req_to_token",
}  # fmt: skip
PAGED = {"decode_attention", "alloc_extend", "get_last_loc"}
MORE = {"ngram": {"kv_move"}, "standalone": PAGED, "eagle": PAGED}


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, 199, (n,), generator=g).tolist() for n in (3, 14, 1, 22)]


@functools.cache
def jobs() -> dict[str, dict[str, Any]]:
    """Prompts of different lengths at once, and the same again."""
    llama = str(vllm_models.tiny_model("llama-gqa"))
    models = {
        "ngram": (llama, None),
        "standalone": (llama, llama),
        "eagle": (str(drafts.target()), str(drafts.eagle())),
    }
    made: dict[str, dict[str, Any]] = {
        name: {
            "model": models[name][0], "rounds": [prompts(), prompts()], "new": NEW,
            "engine": {**engine, "speculative_draft_model_path": models[name][1]},
        }
        for name, engine in ENGINES.items()
    }  # fmt: skip
    for name, job in made.items():
        job["name"] = name
    return made


@functools.cache
def folder() -> Path:
    path = vllm_models.folder() / "sglang-speculative"
    path.mkdir(exist_ok=True)
    return path


@functools.cache
def started() -> subprocess.Popen[bytes]:
    """All jobs, begun."""
    (folder() / "jobs.json").write_text(json.dumps(list(jobs().values())))
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HAL_") or k == "HAL_CACHE_DIR"},
        "HAL_ENGINES": "sglang", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder() / "worker.txt").open("w") as out:
        found = subprocess.Popen(
            [sys.executable, HERE / "sglang_worker.py", folder() / "jobs.json", folder()],
            env=environment, stdout=out, stderr=out,
        )  # fmt: skip
    atexit.register(found.kill)
    return found


@functools.cache
def result(job: str) -> dict[str, Any]:
    """What came of a job that is to succeed."""
    assert not started().wait(), (folder() / "worker.txt").read_text()[-4000:]
    found = json.loads((folder() / f"{job}.json").read_text())
    log = (folder() / f"{job}.log").read_text()
    assert "error" not in found, found.get("traceback", "") + log[-4000:]
    return {**found, "calls": {op: sum(by.values()) for op, by in found["trace"].items()}, "log": log}


@pytest.mark.parametrize("job", ENGINES)
def test_tokens_are_transformers(job: str) -> None:
    started()  # they work while transformers does
    given = jobs()[job]
    want = expected(given["model"])
    assert [found["tokens"] for found in result(job)["rounds"]] == [want, want]


@functools.cache
def expected(model: str) -> list[list[int]]:
    return vllm_models.generate(model, prompts(), NEW)


@pytest.mark.parametrize("job", ENGINES)
def test_hal_ran_every_op(job: str) -> None:
    found = result(job)
    assert all(set(by) == {"cpu"} for by in found["trace"].values())
    assert set(found["trace"]) == EVERY | MORE[job]


@pytest.mark.parametrize("job", ENGINES)
def test_cached_prefixes_are_used(job: str) -> None:
    assert max(result(job)["rounds"][1]["cached"]) >= 16


@pytest.mark.parametrize(("job", "layers"), [("standalone", 2), ("eagle", 1)])
def test_every_layer_of_every_step(job: str, layers: int) -> None:
    """A step is two drafts that are read, the target's verification, and the draft model's reading of what it took."""
    calls = result(job)["calls"]
    steps = calls["assign_extend_cache_locs"]
    assert calls["decode_attention"] == layers * (STEPS - 1) * steps
    # Prompts are read by both models. `compute_positions` is not asked when verifying. The counts are written while the
    # worker's last prompt runs: its two forwards may lack their layers.
    assert 0 <= layers * (calls["compute_positions"] + steps) - calls["extend_attention"] <= 2 * layers


@pytest.mark.parametrize(("job", "rounds"), [("ngram", 2), ("standalone", 2), ("eagle", 2)])
def test_drafts_are_taken(job: str, rounds: int) -> None:
    """In fewer steps than one a token: n-grams find the second round's tokens in the first one's."""
    assert result(job)["calls"]["assign_extend_cache_locs"] < rounds * (NEW - 1) * 3 // 4
