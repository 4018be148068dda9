"""Real SGLang on hal: tokens as transformers', hal's ops called and nobody else's attention, the rest refused.

Run by `ci/engines sglang`, in an environment of its own. One process imports SGLang and forks an engine a job
(`sglang_worker`); stock SGLang does not start on such a CPU, so transformers is what all is compared with.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.engines.sglang import vision

# transformers and SGLang import torchvision, with hal off too.
vision.declare_operators()

from engines import third_party, vllm_models, workers  # noqa: E402
from scale.rounds import evicted, prompts, shared_prefix  # noqa: E402

HERE = Path(__file__).parent
SHAPES = ("llama-gqa", "gemma2-window-cap", "stablelm-partial-rotary", "qwen3-moe", "deepseek-v2-mla")
LAYERS = 2
STEP = {"build_kv_indices", "write_req_to_token", "compute_positions", "decode_attention", "extend_attention"}
PAGED = {"alloc_extend", "alloc_decode", "get_last_loc"}
ACME = (*sorted(STEP | PAGED), "kv_write", "rope_kv_write", "mla_kv_write")


@functools.cache
def jobs() -> dict[str, dict[str, Any]]:
    """What is run, by name."""
    llama, latent = (str(vllm_models.tiny_model(s)) for s in ("llama-gqa", "deepseek-v2-mla"))
    small, fp8, reference = {"chunked_prefill_size": 16}, {"kv_cache_dtype": "fp8_e4m3"}, {"HAL_BACKEND": "reference"}
    made: dict[str, dict[str, Any]] = {
        **{
            f"smollm2-page-{page}": {
                "model": str(vllm_models.smollm2()),
                "rounds": [vllm_models.chats()],
                "new": 8,
                "engine": {"page_size": page, "max_total_tokens": 2560},
            }
            for page in (1, 16, 64)
        },
        **{shape: {"model": str(vllm_models.tiny_model(shape)), "rounds": [prompts()]} for shape in SHAPES},
        # Rounds of prompts that are cached, in pieces of 16 tokens, beside requests that are at it.
        "chunked": {"model": llama, "rounds": shared_prefix(), "engine": {**small, "enable_mixed_chunk": True}},
        "latent-chunked": {"model": latent, "rounds": shared_prefix(), "engine": small},
        "page-1": {
            "model": llama,
            "rounds": shared_prefix(),
            "engine": {**small, "page_size": 1, "disable_overlap_schedule": True},
        },
        # 8 requests come to 100 tokens each.
        "retracted": {
            "model": llama,
            "rounds": [prompts((40,) * 8, seed=7)],
            "new": 60,
            "engine": {"max_total_tokens": 512, "schedule_conservativeness": 0.01},
            # SGLang keeps room for all that a request may write if nothing ends it before.
            "sampling": {"ignore_eos": False},
        },
        **{
            f"hicache-{layout}": {
                "model": model,
                "rounds": evicted(),
                "engine": {
                    "enable_hierarchical_cache": True,
                    "hicache_ratio": 4.0,
                    "hicache_mem_layout": layout,
                    "hicache_io_backend": io,
                    "max_total_tokens": 320,
                },
            }
            for layout, io, model in (
                ("layer_first", "kernel", llama),
                ("page_first", "kernel", latent),
                ("page_head", "kernel", llama),
                ("page_first_direct", "direct", llama),
            )
        },
        "fp8-cache": {"model": llama, "rounds": [prompts()], "engine": fp8},
        "fp8-reference": {"model": llama, "rounds": [prompts()], "engine": fp8, "env": reference},
        "latent-fp8": {"model": latent, "rounds": [prompts()], "engine": fp8},
        "latent-fp8-reference": {"model": latent, "rounds": [prompts()], "engine": fp8, "env": reference},
        "reference": {"model": llama, "rounds": shared_prefix(), "engine": small, "env": reference},
        "latent-reference": {"model": latent, "rounds": [prompts()], "env": reference},
        "acme": {"model": llama, "rounds": shared_prefix(), "engine": small, "env": {"HAL_BACKEND": "acme"}},
        "sinks": {"model": str(vllm_models.tiny_model("gpt-oss-sinks")), "rounds": [prompts((3,))]},
        **{name: {"model": llama, "rounds": [], "engine": changed} for name, (changed, _) in REFUSED.items()},
    }
    for name, job in made.items():
        job["name"] = name
    return {name: job for name, job in made.items() if name not in LEFT_OUT}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "context-parallel": ({"attn_cp_size": 2, "tp_size": 2}, "context parallelism (--attn-cp-size 2)"),
    "another-attention": ({"attention_backend": "triton"}, "--attention-backend triton: all attention is hal's"),
}
"""Settings that hal refuses, and how."""
if metadata.version("sglang") == "0.5.17":
    ngrams = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    REFUSED["chains"] = (ngrams, "speculative decoding (--speculative-algorithm NGRAM): on a CPU this SGLang has it by")
HICACHE = [f"hicache-{layout}" for layout in ("layer_first", "page_first", "page_head", "page_first_direct")]
SCENARIOS = [*HICACHE, "chunked", "latent-chunked", "page-1", "retracted", "reference", "latent-reference"]
SMOLLM2 = [f"smollm2-page-{page}" for page in (1, 16, 64)]
LEFT_OUT = (
    ()
    if os.environ.get("CI_ALL")
    else (
        *SMOLLM2,
        "reference",
        "latent-reference",
        "latent-fp8",
        "latent-fp8-reference",
        "hicache-page_head",
        "stablelm-partial-rotary",
    )
)
"""Engines whose settings others have, each by itself (SmolLM2 `test_sglang_server`, the reference's functions `acme`,
pages by heads on the host `tests/scale/test_sglang`, a rotation of a part vLLM's): they start in `ci/test all`."""
SMOLLM2, SCENARIOS, HICACHE, SHAPES = (
    [job for job in some if job not in LEFT_OUT] for some in (SMOLLM2, SCENARIOS, HICACHE, SHAPES)
)


@functools.cache
def worker() -> workers.Worker:
    path = vllm_models.folder() / "sglang"
    path.mkdir(exist_ok=True)
    third_party.add(path, ACME)
    environment = workers.environment(HAL_ENGINES="sglang", OMP_NUM_THREADS="1", PYTHONPATH=str(path))
    return workers.Worker("sglang_worker.py", path, jobs(), environment)


def result(job: str) -> dict[str, Any]:
    return worker().result(job)


def tokens(job: str) -> list[list[int]]:
    return result(job)["rounds"][-1]["tokens"]


def ran(job: str) -> dict[str, set[str]]:
    """The backends by op."""
    return {op: set(by) for op, by in result(job)["trace"].items()}


# --- tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [*SMOLLM2, *SHAPES, *SCENARIOS, "acme"])
def test_tokens_are_transformers(job: str) -> None:
    worker()  # it works while transformers does
    given = jobs()[job]
    want = expected(given["model"], json.dumps(given["rounds"][-1]), given.get("new", 12))
    assert tokens(job) == want


@functools.cache
def expected(model: str, given: str, new: int) -> list[list[int]]:
    return vllm_models.generate(model, json.loads(given), new)


def test_the_scenarios_are_what_they_are_called() -> None:
    for job in {"chunked", "latent-chunked", "page-1", "reference", "acme"} - {*LEFT_OUT}:
        assert min(result(job)["rounds"][1]["cached"]) >= 80, job
        # The first prompt alone takes six steps of sixteen tokens.
        assert sum(result(job)["trace"]["compute_positions"].values()) > 6, job
    assert "Retract requests" in worker().log("retracted")
    assert "Retract requests" not in worker().log("chunked")
    for job in HICACHE:
        # The device's pool holds the others alone by then.
        assert result(job)["rounds"][-1]["cached"] == [160], job
        assert result(job)["trace"]["kv_transfer"]["cpu"] > LAYERS, job
    for job in SHAPES:
        assert result(job)["settings"] == {
            "attention_backend": "hal",
            "disable_overlap_schedule": False,
            "page_size": 16,
        }
    assert result("page-1")["settings"]["disable_overlap_schedule"]


def test_fp8_cache() -> None:
    """Two backends that round k and v alike, and not as a float32 cache does."""
    assert tokens("fp8-cache") == tokens("fp8-reference")
    assert tokens("fp8-cache") != tokens("llama-gqa")
    if "latent-fp8" in jobs():
        assert tokens("latent-fp8") == tokens("latent-fp8-reference")
        assert tokens("latent-fp8") != tokens("deepseek-v2-mla")


# --- who ran ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [*SMOLLM2, *SHAPES, *SCENARIOS, "acme"])
def test_hal_ran_every_op(job: str) -> None:
    backend = {"reference": "reference", "latent-reference": "reference", "acme": "acme"}.get(job, "cpu")
    write = {"mla_kv_write"} if "latent" in job or "mla" in job else {"kv_write"}
    if job == "qwen3-moe":
        write = set()  # the rotation writes k and v
    if job in HICACHE:
        write = {"mla_kv_write" if job == "hicache-page_first" else "kv_write", "kv_transfer"}
    paged = set() if job in ("smollm2-page-1", "page-1") else PAGED
    assert ran(job) == {op: {backend} for op in STEP | paged | write | {"rope_kv_write"}}


@pytest.mark.parametrize("job", [*SHAPES, "retracted"])
def test_hal_ran_every_layer_of_every_step(job: str) -> None:
    calls = {op: sum(by.values()) for op, by in result(job)["trace"].items()}
    assert calls["decode_attention"] + calls["extend_attention"] == LAYERS * calls["build_kv_indices"]
    assert calls["rope_kv_write"] == LAYERS * calls["build_kv_indices"]


# --- what is refused --------------------------------------------------------------------------------


def refusal(job: str) -> str:
    return worker().outcome(job)["error"]


@pytest.mark.parametrize("job", REFUSED)
def test_settings_that_hal_lacks_are_refused(job: str) -> None:
    assert refusal(job).startswith("EngineError: hal: sglang can't run this on hal: ")
    assert REFUSED[job][1] in refusal(job)


def test_a_model_that_needs_what_hal_lacks_does_not_start() -> None:
    """SGLang itself has a list of the attentions that this one may have."""
    assert "GptOssForCausalLM requires one of" in refusal("sinks")


# --- switched on or off -----------------------------------------------------------------------------

LOOK = """
import json, sys
from hal.engines.sglang import vision
vision.declare_operators()
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.mem_cache.allocation as allocation
import sglang.srt.model_executor.forward_batch_info as batch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
try:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
except ImportError:
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins.hook_registry import HookRegistry
import sglang.srt.platforms as platforms
try:
    platform = type(platforms.current_platform).__name__
except Exception as e:
    platform = f"{type(e).__name__}: {e}"
print("LOOK" + json.dumps({
    "platform": platform,
    "functions": [f.__module__ for f in (allocation.get_last_loc, batch.compute_position)],
    "wrapped": [hasattr(f, "__wrapped__") for f in (allocation.get_last_loc, batch.compute_position)],
    "hooks": len(HookRegistry._hooks),
    "decode": dict(getattr(allocation, "ALLOC_FOR_DECODE_FUNCS", {})) == {},
    "rotary": bool(RotaryEmbedding._oot_forward_registry),
    "triton": getattr(ATTENTION_BACKENDS["triton"], "__module__", "hal"),
    "choice": ATTENTION_BACKEND_CHOICES.count("hal"),
    "modules": [m for m in sys.modules if m.startswith(("hal.backends", "hal.engines.sglang."))],
}))
"""


def look(**env: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}
    ran = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "LOOK" in ran.stdout, ran.stderr[-4000:]
    return json.loads(ran.stdout.split("LOOK", 1)[1])


def test_installed_is_not_switched_on() -> None:
    assert look() == {
        "platform": "SRTPlatform",
        "functions": ["sglang.srt.mem_cache.allocation", "sglang.srt.model_executor.forward_batch_info"],
        "wrapped": [False, False],
        "hooks": 0,
        "decode": True,
        "rotary": False,
        "triton": "sglang.srt.layers.attention.attention_registry",
        "choice": 1,
        "modules": ["hal.engines.sglang.vision", "hal.engines.sglang.apart", "hal.engines.sglang.limits"],
    }


def test_another_version_is_refused() -> None:
    code = """
from dataclasses import replace
from hal.engines import _engine
_engine.ENGINES["sglang"] = replace(_engine.ENGINES["sglang"], tested=">=99")
from hal.engines.sglang import vision
vision.declare_operators()
import sglang.srt.utils
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HAL_ENGINES": "sglang"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode
    told = ran.stderr.splitlines()[-1]
    assert told.startswith("hal.engines._engine.EngineError: hal: sglang can't run on hal: sglang 0.5.")
    assert "tested with >=99" in told
