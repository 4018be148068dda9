"""SGLang's OpenAI server on hal, in processes that SGLang spawns itself, with clients at the same time."""

from __future__ import annotations

import importlib.util
import json
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
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from hal.engines.sglang import vision

vision.declare_operators()

from engines import vllm_models, workers  # noqa: E402

import hal  # noqa: E402

NEW = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(where it listens, its trace)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = tmp_path_factory.mktemp("server")
    trace, log, where = path / "calls.trace", path / "log.txt", f"http://127.0.0.1:{port}"
    options = """
        --device cpu --dtype float32 --max-total-tokens 2560 --page-size 16 --skip-server-warmup --sleep-on-idle
    """.split()
    model = ["--model-path", str(vllm_models.smollm2())]
    command = [sys.executable, "-m", "sglang.launch_server", *model, *options, "--port", str(port)]
    environment = {**workers.environment(), "HAL_ENGINES": "sglang", "HAL_TRACE": str(trace), "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        run = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        while run.poll() is None:
            try:
                urllib.request.urlopen(f"{where}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        assert run.poll() is None, log.read_text()[-4000:]
        yield where, trace
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait(60)


def complete(where: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "any", "prompt": prompt, "temperature": 0, "max_tokens": NEW, "ignore_eos": True}
    request = urllib.request.Request(
        f"{where}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def test_concurrent_clients(server: tuple[str, Path]) -> None:
    import transformers

    where, trace = server
    chats = vllm_models.chats()
    with ThreadPoolExecutor(len(chats)) as pool:
        answers = list(pool.map(lambda chat: complete(where, chat), chats))
    tokenizer = transformers.AutoTokenizer.from_pretrained(vllm_models.smollm2())
    want = vllm_models.generate(str(vllm_models.smollm2()), chats, NEW)
    assert [a["choices"][0]["text"] for a in answers] == [
        tokenizer.decode(tokens, skip_special_tokens=True) for tokens in want
    ]
    assert [a["usage"]["prompt_tokens"] for a in answers] == list(map(len, chats))
    time.sleep(1.1)
    complete(where, chats[0])  # what was counted is written once a second, by a call
    calls = hal.trace(trace)
    assert calls.count("decode_attention", "cpu") > 0
    assert calls.count() == calls.count(backend="cpu")
