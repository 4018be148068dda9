"""Speculative decoding in SGLang on hal: tokens as without it, drafts taken, hal's ops under their real callers.

Run by `ci/engines sglang`, one engine an algorithm.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.engines.sglang import vision

vision.declare_operators()

from engines import drafts, vllm_models, workers  # noqa: E402

HERE = Path(__file__).parent
STEPS, NEW = 3, 24
DRAFTED = {
    "speculative_eagle_topk": 1,
    "speculative_num_steps": STEPS,
    "speculative_num_draft_tokens": STEPS + 1,
    "page_size": 16,
}
IN_TREES = {**DRAFTED, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8, "page_size": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "ngram": {
        "speculative_algorithm": "NGRAM",
        "speculative_ngram_max_bfs_breadth": 3,
        "speculative_num_draft_tokens": 6,
        "page_size": 1,
    },
    "standalone": {"speculative_algorithm": "STANDALONE", **DRAFTED},
    "eagle-trees": {"speculative_algorithm": "EAGLE", **IN_TREES},
    "nextn": {"speculative_algorithm": "NEXTN", **DRAFTED, "page_size": 1},
    "nextn-trees": {"speculative_algorithm": "NEXTN", **IN_TREES},
    "eagle3": {"speculative_algorithm": "EAGLE3", **DRAFTED},
    "eagle3-trees": {"speculative_algorithm": "EAGLE3", **IN_TREES},
}
if not os.environ.get("CI_ALL"):
    del ENGINES["nextn"]  # chains are the others', its model and its latent rows `nextn-trees`'
EVERY = {
    "assign_extend_cache_locs",
    "build_kv_indices",
    "compute_positions",
    "decode_attention",
    "extend_attention",
    "rope_kv_write",
    "write_req_to_token",
}
PAGED, TREES = {"alloc_extend", "get_last_loc"}, {"kv_move"}
MORE = {
    **{job: {"kv_write", *TREES} for job in ("ngram", "eagle-trees", "eagle3-trees")},
    **{job: {"kv_write", *PAGED} for job in ("standalone", "eagle3")},
    "nextn": {"mla_kv_write"},
    "nextn-trees": {"mla_kv_write", *TREES},
}


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
        "eagle-trees": (str(drafts.target()), str(drafts.eagle())),
        **dict.fromkeys(("nextn", "nextn-trees"), (str(drafts.deepseek()), str(drafts.mtp()))),
        **dict.fromkeys(("eagle3", "eagle3-trees"), (str(drafts.cyclic()), str(drafts.eagle3()))),
    }
    made: dict[str, dict[str, Any]] = {
        name: {
            "model": models[name][0],
            "rounds": [prompts(), prompts()],
            "new": NEW,
            "engine": {**engine, "speculative_draft_model_path": models[name][1]},
        }
        for name, engine in ENGINES.items()
    }
    made["window"] = {
        "model": str(vllm_models.tiny_model("gemma2-window-cap")),
        "rounds": [],
        "engine": {**ENGINES["ngram"], "disable_hybrid_swa_memory": True},
    }
    for name, job in made.items():
        job["name"] = name
    return made


@functools.cache
def worker() -> workers.Worker:
    path = vllm_models.folder() / "sglang-speculative"
    path.mkdir(exist_ok=True)
    environment = workers.environment(HAL_ENGINES="sglang", OMP_NUM_THREADS="1")
    return workers.Worker("sglang_worker.py", path, jobs(), environment)


def result(job: str) -> dict[str, Any]:
    found = worker().result(job)
    calls = {op: sum(by.values()) for op, by in found["trace"].items()}
    return {**found, "calls": calls, "log": worker().log(job)}


@pytest.mark.parametrize("job", ENGINES)
def test_tokens_are_transformers(job: str) -> None:
    worker()  # it works while transformers does
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


@pytest.mark.parametrize(
    ("job", "target", "draft"),
    [x for x in (("standalone", 2, 2), ("nextn", 1, 1), ("eagle3", drafts.LAYERS, 1)) if x[0] in ENGINES],
)
def test_every_layer_of_every_step(job: str, target: int, draft: int) -> None:
    """A step is two drafts that are read, the target's verification, and the draft model's reading of what it took."""
    calls = result(job)["calls"]
    verified = calls["assign_extend_cache_locs"]
    assert calls["decode_attention"] == draft * (STEPS - 1) * verified
    forwards = read_by_both(calls, verified) + verified
    assert 0 <= (target + draft) * forwards - calls["extend_attention"] <= target + draft


@pytest.mark.parametrize(
    ("job", "target", "draft"), [("eagle-trees", 1, 1), ("nextn-trees", 1, 1), ("eagle3-trees", drafts.LAYERS, 1)]
)
def test_every_layer_of_every_step_in_trees(job: str, target: int, draft: int) -> None:
    """Branches and the tree are read by both ops in each layer, prefix and drafts; what was taken, as in chains."""
    calls = result(job)["calls"]
    verified = calls["kv_move"]
    in_trees = (draft * (STEPS - 1) + target) * verified
    assert calls["decode_attention"] == in_trees
    forwards = (target + draft) * read_by_both(calls, verified) + draft * verified
    assert 0 <= forwards - (calls["extend_attention"] - in_trees) <= target + draft


def read_by_both(calls: dict[str, int], verified: int) -> int:
    """Forwards of prompts, which both models read. `compute_positions` is not asked when verifying, but when the draft
    model reads what was taken. The counts are written while the worker's last prompt runs: it may lack its layers."""
    return (calls["compute_positions"] - verified + 1) // 2


@pytest.mark.parametrize("job", ENGINES)
def test_drafts_are_taken(job: str) -> None:
    """In fewer steps than one a token: n-grams find the second round's tokens in the first one's."""
    assert times_verified(job) < 2 * len(prompts()) * (NEW - 1) * 3 // 4


def times_verified(job: str) -> int:
    """Of all requests."""
    return sum(sum(found["verified"]) for found in result(job)["rounds"])


def test_alternatives_are_taken() -> None:
    """A chain ends where the draft's first choice is wrong, a tree as deep goes on with the next."""
    assert times_verified("eagle3-trees") < times_verified("eagle3")


def test_windows_beside_trees_are_refused() -> None:
    assert "error" in worker().outcome("window")
    assert "hal: sglang can't run this on hal: a sliding window beside trees" in worker().log("window")
