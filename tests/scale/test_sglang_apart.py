"""Real SGLang on hal, prefill in one process and decode in another, by SGLang's own disaggregation: NIXL over TCP.

Run by `ci/scale`, in SGLang's environment. `sglang_served.py` forks an engine each. That one process's tokens are
transformers' is `engines/test_sglang.py`'s to say.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)
pytest.importorskip("nixl", reason="NIXL is not installed here: the extra nixl")

from hal.engines.sglang import vision

vision.declare_operators()

from engines import vllm_models  # noqa: E402
from scale import rounds, served  # noqa: E402

PIECE = 16
"""Tokens of a prompt that are computed at once."""


@functools.cache
def folder() -> Path:
    path = vllm_models.folder() / "sglang-apart"
    path.mkdir()
    return path


@functools.cache
def engines() -> tuple[served.Engine, served.Engine, int]:
    """(prefill, decode, the port by which they meet)."""
    environment = {
        "HAL_ENGINES": "sglang",
        "HAL_BACKEND": "cpu",
        "OMP_NUM_THREADS": "1",
        "HAL_TRACE": str(folder() / "calls.trace"),
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        # How long the slots of a request are kept whose prefill is gone: all the while its scheduler takes a core.
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "4",
        **served.UCX,
    }
    worker, port = served.Served("sglang_served.py", folder(), environment), served.free_port()
    common = {
        "model_path": str(vllm_models.smollm2()),
        "disaggregation_transfer_backend": "nixl",
        "chunked_prefill_size": PIECE,
    }
    return (
        worker.start("prefill", {**common, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}),
        worker.start("decode", {**common, "disaggregation_mode": "decode"}),
        port,
    )


def prompts() -> list[list[int]]:
    """All of more than a piece, the last of several."""
    chats = vllm_models.chats()[:2]
    return [*chats, (chats[0] + chats[1]) * 2]


@functools.cache
def both() -> tuple[dict[str, Any], dict[str, Any]]:
    prefill, decode, port = engines()
    for one in (prefill, decode):
        one.tell(prompts=prompts(), room=100, port=port)
    return prefill.hear(), decode.hear()


def test_tokens_are_those_of_one_process() -> None:
    engines()  # they start while transformers works
    want = vllm_models.generate(str(vllm_models.smollm2()), prompts(), 12)
    first, then = both()
    assert then.get("tokens") == want, then
    assert first.get("tokens") == [t[:1] for t in want], first
    assert all(len(p) > PIECE for p in prompts())


def test_each_computes_its_own_part() -> None:
    both()
    found = rounds.processes(folder() / "calls.trace")
    kinds = sorted("".join(sorted(op[0] for op in ops if op.endswith("attention"))) for ops in found.values())
    assert kinds == ["d", "e"], found


def test_a_room_that_is_used_again_holds_nothing_of_the_first() -> None:
    """The same number for another prompt: its keys and values are computed and sent anew."""
    want = both()[1]["tokens"][1:2]
    prefill, decode, port = engines()
    for one in (prefill, decode):
        one.tell(prompts=prompts()[1:2], room=100, port=port)
    assert prefill.hear()["tokens"] == [t[:1] for t in want]
    assert decode.hear()["tokens"] == want


def test_nobody_listens_where_the_prefill_is_said_to_be() -> None:
    both()
    _, decode, _ = engines()
    found = decode.ask(prompts=prompts()[:1], room=300, port=served.free_port())
    assert "Decode handshake failed" in found["aborted"], found
    assert not decode.ask(free=True)["used"]


def test_the_prefill_dies_while_its_kv_is_waited_for() -> None:
    both()
    prefill, decode, port = engines()
    assert not decode.ask(free=True)["used"]
    decode.tell(prompts=prompts()[:1], room=200, port=port)
    time.sleep(2)
    prefill.kill()
    found = decode.hear()
    assert "Lost connection with prefill instance" in found["aborted"]
    end = time.monotonic() + 60
    while decode.ask(free=True)["used"]:
        assert time.monotonic() < end
        time.sleep(0.2)
    decode.kill()
