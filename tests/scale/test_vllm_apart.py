"""Real vLLM on hal, prefill in one process and decode in another, by vLLM's own NixlConnector over TCP on the loopback.

Run by `ci/scale`, in vLLM's environment. `vllm_served.py` forks an engine each.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        **vllm_models.ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HAL_ENGINES": "vllm",
        "HAL_BACKEND": "cpu",
        "VLLM_CACHE_ROOT": str(folder() / "cache"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "HAL_TRACE": str(folder() / "calls.trace"),
        **served.UCX,
    }
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


@functools.cache
def promised(n: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The last `n` prompts, and what the prefill says of where their keys and values are."""
    given = prompts("llama-gqa")[-n:]
    return given, engines("llama-gqa")[0].ask(prompts=given, new=1, kv=[PREFILL] * n)["kv"]


def refused(**changed: Any) -> None:
    """A request whose KV can't be had ends with an error, and holds nothing."""
    given, kv = promised(1)
    found = engines("llama-gqa")[1].ask(prompts=given, kv=[{**kv[0], **changed}])
    assert found["finish"] == ["error"], found
    assert found["free"] == run("llama-gqa")[2]["free"]


def test_nobody_listens_where_the_kv_is_said_to_be() -> None:
    refused(remote_engine_id="nobody", remote_port=served.free_port())


def test_another_engine_listens_there() -> None:
    refused(remote_engine_id="another")


@contextmanager
def stranger() -> Iterator[int]:
    """The port of a prefill of another version, model, dtype or attention backend: vLLM makes a hash of these."""
    import msgspec
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        port = sock.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            if not sock.poll(60_000):  # on a busy machine vLLM may give up before it has asked
                return
            who, empty, _ = sock.recv_multipart()
            said = msgspec.msgpack.encode({"compatibility_hash": "another", "agent_metadata_bytes": b""})
            sock.send_multipart([who, empty, said, msgspec.msgpack.encode(time.perf_counter())])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield port
        thread.join()


def test_versions_or_layouts_differ() -> None:
    """vLLM waits 5 s for the answer. On a busy machine that may be too short: then another is asked."""
    for n in range(3):
        before = len(worker().log.read_text())
        with stranger() as port:
            refused(remote_engine_id=f"stranger {n}", remote_port=port)
        said = worker().log.read_text()[before:]
        if "NIXL compatibility hash mismatch" in said:
            return
        assert "Resource temporarily unavailable" in said, said[-4000:]
    pytest.fail("no answer came in time")


def test_a_stale_promise_is_refused() -> None:
    """The same request twice: by then the prefill's blocks are another's, and vLLM's own decode would read those."""
    prefill, decode = engines("llama-gqa")
    given = prompts("llama-gqa")[-1:]
    kv = prefill.ask(prompts=given, new=1, kv=[PREFILL])["kv"]
    assert decode.ask(prompts=given, kv=kv)["tokens"] == run("llama-gqa")[2]["tokens"][-1:]
    prefill.ask(prompts=rounds.prompts((250, 251, 252, 249), seed=77), new=1)
    again = decode.ask(prompts=given, kv=kv)
    assert again["finish"] == ["error"], again
    assert again["free"] == run("llama-gqa")[2]["free"]
    assert "were read already, by request" in worker().log.read_text()


def test_the_decodes_pool_is_full() -> None:
    """Four requests of a quarter of the pool and a little more: the last waits, and none is wrong."""
    prefill, decode = engines("llama-gqa")
    # What refused requests were promised is read: the prefill's last would wait half a minute for those blocks.
    decode.ask(prompts=promised(1)[0], kv=promised(1)[1])
    given = rounds.prompts((241, 242, 243, 240), seed=8)
    kv = prefill.ask(prompts=given, new=1, kv=[PREFILL] * 4)["kv"]
    found = decode.ask(prompts=given, kv=kv)
    assert found["finish"] == ["length"] * 4
    assert found["tokens"] == decode.ask(prompts=given)["tokens"]
    assert found["free"] == run("llama-gqa")[2]["free"] < 4 * 16


def test_the_prefill_dies_while_it_sends() -> None:
    prefill, decode = engines("llama-gqa")
    given, kv = promised(3)
    prefill.stop()  # reads of its memory begin, and do not end
    decode.tell(prompts=given[:2], kv=kv[:2])
    assert not decode.heard(2), decode.hear()
    prefill.kill()
    found = decode.hear()
    assert found["finish"] == ["error"] * 2, found
    assert found["free"] == run("llama-gqa")[2]["free"]
    # Another, of the same dead prefill; and then it goes on by itself.
    assert decode.ask(prompts=given[2:], kv=kv[2:])["finish"] == ["error"]
    assert decode.ask(prompts=given)["tokens"] == run("llama-gqa")[2]["tokens"][-3:]
    decode.kill()


@pytest.mark.skipif(not os.environ.get("CI_ALL"), reason="a larger model by the same ways: ci/test all")
def test_smollm2() -> None:
    check("smollm2")
