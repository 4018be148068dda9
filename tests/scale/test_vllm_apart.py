"""Real vLLM on hal, prefill in one process and decode in another, by vLLM's own NixlConnector over TCP on the loopback.

Run by `ci/scale`, in vLLM's environment. `vllm_served.py` forks an engine each.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")
pytest.importorskip("nixl", reason="NIXL is not installed here: the extra nixl")

from engines import vllm_models
from scale import rounds, served

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@functools.cache
def folder() -> Path:
    path = vllm_models.folder() / "apart"
    path.mkdir()
    return path


@functools.cache
def models() -> dict[str, str]:
    """SmolLM2 has three KV heads, which no two processes can share: that is the tiny model's part."""
    return {"smollm2": str(vllm_models.smollm2()), "llama-gqa": str(vllm_models.tiny_model("llama-gqa"))}


def prompts(model: str) -> list[list[int]]:
    return vllm_models.chats()[:2] if model == "smollm2" else rounds.prompts()


@functools.cache
def worker() -> served.Served:
    environment = {
        **vllm_models.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HAL_ENGINES": "vllm", "HAL_BACKEND": "cpu",
        "VLLM_CACHE_ROOT": str(folder() / "cache"), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "HAL_TRACE": str(folder() / "calls.trace"), **served.UCX,
    }  # fmt: skip
    return served.Served("vllm_served.py", folder(), environment)


def engine(model: str, role: str, size: int = 1) -> served.Engine:
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    settings = {"model": models()[model], "tensor_parallel_size": size, "kv_transfer_config": config}
    port = str(served.free_port())
    return worker().start(f"{model} {role}", settings, VLLM_NIXL_SIDE_CHANNEL_PORT=port)


@functools.cache
def engines(model: str) -> tuple[served.Engine, served.Engine]:
    """(prefill, decode), of which both start before one is waited for."""
    size = 1 if model == "smollm2" else 2
    return engine(model, "kv_producer", size), engine(model, "kv_consumer")


@functools.cache
def run(model: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a prefill, a decode of it, and a process that does both say."""
    prefill, decode = engines(model)
    first = prefill.ask(prompts=prompts(model), new=1, kv=[PREFILL] * len(prompts(model)))
    return (first, decode.ask(prompts=prompts(model), kv=first["kv"]), decode.ask(prompts=prompts(model)))


def check(model: str) -> None:
    first, then, alone = run(model)
    assert then["tokens"] == alone["tokens"]
    assert first["tokens"] == [t[:1] for t in alone["tokens"]]
    assert alone["tokens"] == vllm_models.generate(models()[model], prompts(model), 12)
    # No prompt is computed twice: of each, its last token alone.
    assert "extend_attention" in alone["calls"]
    assert "extend_attention" not in then["calls"]
    assert then["calls"]["decode_attention"] > 0
    # Blocks are kept until they were read, and no longer.
    assert then["free"] == alone["free"]
    assert first["free"] < alone["free"]
    prefill, _ = engines(model)
    end = time.monotonic() + 60
    while prefill.ask(prompts=[[1]], new=1)["free"] != alone["free"]:
        assert time.monotonic() < end


def test_two_processes_prefill_and_one_decodes() -> None:
    check("llama-gqa")


def test_the_prefill_dies_before_it_is_read() -> None:
    prefill, decode = engines("llama-gqa")
    alone = run("llama-gqa")[2]
    given = prompts("llama-gqa")[-2:]
    promised = prefill.ask(prompts=given, new=1, kv=[PREFILL] * 2)["kv"]
    prefill.kill()
    found = decode.ask(prompts=given, kv=promised)
    assert found["finish"] == ["error"] * 2, found
    assert found["free"] == alone["free"]
    # It goes on by itself.
    assert decode.ask(prompts=given)["tokens"] == alone["tokens"][-2:]
    decode.kill()


@pytest.mark.skipif(not os.environ.get("CI_ALL"), reason="a larger model by the same ways: ci/test all")
def test_smollm2() -> None:
    check("smollm2")
