"""Attention calls that a host is too slow for: their launches are begun as one graph, whose results are theirs.

Without a GPU: which calls those are; how graphs are made and set: ``tests/launch/test_plan_graphs.py``. On a GPU
(``ci/h200``): on several streams, from several threads, with hundreds under way, beside a captured graph of launches.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from typing import Any

import pytest
import torch

from hal.ops import get_spec

pytest.importorskip("triton.knobs", reason="the helper serves the Triton which has `knobs`")

from hal.triton import launch

if os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("HAL_LANE"):
    pytest.skip("of the device lane's launcher", allow_module_level=True)

CUDA = torch.cuda.is_available()
MLA = {"head_dim": 576, "v_head_dim": 512, "kv_heads": 1, "q_heads": 16, "cache_view": "shared", "dtype": "bf16"}
HEADS = {"head_dim": 128, "v_head_dim": 128, "kv_heads": 2, "q_heads": 8, "dtype": "bf16"}
FEW = {"bs": 3, "lengths": "full", "longest": 5, "slots": 9600}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode-mla": ("decode_attention", {**MLA, "bs": 3, "longest": 700, "slots": 2400}),
    "decode-mla-e4m3": ("decode_attention", {**MLA, "bs": 3, "longest": 700, "slots": 2400, "cache_dtype": "e4m3"}),
    "decode-e4m3": ("decode_attention", {**HEADS, "bs": 3, "longest": 700, "slots": 2400, "cache_dtype": "e4m3"}),
    "extend-mla": ("extend_attention", {**MLA, **FEW, "prefix": 700}),
    "extend": ("extend_attention", {**HEADS, **FEW, "prefix": 1400}),
}
"""Of few long requests, whose keys are split."""


def made(name: str) -> tuple[Any, dict[str, Any]]:
    op, form = CALLS[name]
    return importlib.import_module(f"hal.backends.cuda.{op}"), get_spec(op).make(**form)


@pytest.mark.skipif(CUDA, reason="records launches")
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_read_little_are_begun_as_a_graph(name: str) -> None:
    from hal.backends.cuda import inspect
    from hal.backends.cuda._attention import BRIEF

    module, args = made(name)
    with inspect.record():
        plan = module._plans.make(*(args[n] for n in module._plans.names))
    k, v = args["k_cache"], args["v_cache"]
    row = k.shape[-2] * (k.shape[-1] + (0 if k.data_ptr() == v.data_ptr() else v.shape[-1])) * k.itemsize
    for entries in (0, 1, BRIEF // row, BRIEF // row + 1, 2**31 - 1):
        assert (plan.as_graph.value({"kv_indices": entries}) > 0) == (entries * row <= BRIEF)


def on_device(name: str, seed: int) -> tuple[Any, dict[str, Any]]:
    module, args = made(name)
    args = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    if "mla" in name:
        args["v_cache"] = args["k_cache"][..., :512]
    torch.manual_seed(seed)
    args["q"] = torch.randn(args["q"].shape, dtype=torch.float32).to(args["q"].dtype).cuda()
    return getattr(module, CALLS[name][0]), {**args, "out": None, "lse": None}


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", CALLS)
def test_what_a_graph_of_two_launches_gives_is_what_they_give(name: str) -> None:
    """Bit for bit, of many calls under way, each with arguments of its own, from threads with streams of their own."""
    helper = launch._helper()
    assert helper is not None, launch._why_no_helper
    sets, turns, before = 8, 60, helper.graphs()
    call, first = on_device(name, 0)
    batches = [first, *({**first, "q": on_device(name, i)[1]["q"]} for i in range(1, sets))]
    wants = [torch.full_like(call(**batch), torch.nan) for batch in batches]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch, want in zip(batches, wants, strict=True):
            call(**{**batch, "out": want})
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(wants[0], wants[1])
    failed: list[str] = []

    def calls(of: int) -> None:
        # A graph would not have the last one's priority.
        with torch.cuda.stream(torch.cuda.Stream(priority=-1 if of == 3 else 0)):
            call(**first)
            outs = [torch.full_like(wants[i % sets], torch.nan) for i in range(of, of + turns)]
            for i, out in enumerate(outs, of):
                call(**{**batches[i % sets], "out": out})
            torch.cuda.current_stream().synchronize()
        failed.extend(f"{of}: call {i}" for i, out in enumerate(outs, of) if not torch.equal(out, wants[i % sets]))

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    # These calls are of two launches on Hopper; the driver may be too old for graphs that take less of the host.
    if torch.cuda.get_device_capability()[0] == 9 and launch._of_graphs(ctypes.CDLL("libcuda.so.1")):
        assert helper.graphs() == before + 4, "a graph for each of three streams, and the default one"
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(wants[0], call(**first))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_while_another_stream_is_captured(mode: str) -> None:
    """By another thread, whose captured graph must not come to harm: neither as graphs are made, nor launched."""
    call, args = on_device("decode-mla", 0)
    want = call(**args)
    outs = [torch.full_like(want, torch.nan) for _ in range(3)]
    x = torch.zeros(32, device="cuda")
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        call(**args)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def calls() -> None:
        try:
            with torch.cuda.stream(own):
                for out in outs:
                    call(**{**args, "out": out})
        except BaseException as e:
            failed.append(e)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        x += 1
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        x += 1
    assert not failed, failed
    own.synchronize()
    assert all(torch.equal(out, want) for out in outs)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 32
