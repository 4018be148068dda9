"""Graphs of the emulated device: they hold addresses and the host's values, run when replayed, and allow no wait."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.conformance._cases import case_list
from hal.conformance._find import find, job_for
from hal.conformance._result import PASSED
from hal.conformance._run import run
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec

npu = torch.npu


def test_what_is_captured_runs_when_it_is_replayed_and_not_before() -> None:
    x, y = torch.zeros(2, 64, device="npu:0").unbind()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        assert npu.is_current_stream_capturing()
        x.fill_(3)
        y.copy_(x)
    assert not npu.is_current_stream_capturing()
    assert not y.cpu().any()
    graph.replay()
    assert y.cpu().eq(3).all()
    y.zero_()
    graph.replay()
    assert y.cpu().eq(3).all()


def test_a_wait_in_a_capture_is_an_error() -> None:
    x, late = torch.zeros(4, device="npu:0"), npu.Event()
    late.record()
    for wait in (
        lambda: x.cpu(),
        lambda: x.copy_(torch.ones(4)),
        npu.synchronize,
        late.synchronize,
        lambda: npu.Stream().query(),
    ):
        with pytest.raises(RuntimeError, match="while one is captured"), npu.graph(npu.NPUGraph()):
            wait()
    assert not x.cpu().any()


def test_memory_of_a_graph_is_nobody_elses() -> None:
    graph, out = npu.NPUGraph(), torch.zeros(64, device="npu:0")
    side = npu.Stream()
    with npu.graph(graph, stream=side):
        between = torch.full((64,), 5.0, device="npu:0")
        out.copy_(between)
    del between
    with npu.stream(side):
        mine = torch.full((64,), 7.0, device="npu:0")
        graph.replay()
        assert mine.cpu().eq(7).all()
    assert out.cpu().eq(5).all()


@pytest.mark.parametrize("method", ["auto", "direct"])
def test_slots_of_the_host_are_not_captured(method: str) -> None:
    """A graph would hold their values: every replay would move the same rows."""
    k = torch.randn(1, 64, 2, 16)
    near, there = (KVPool(x.to("npu:0"), None) for x in (k, torch.zeros_like(k)))
    a, b = torch.tensor([1, 2]), torch.tensor([5, 6])
    with pytest.raises(hal.HalError, match="captured"), npu.graph(npu.NPUGraph()):
        hal.kv_transfer(near, there, a, b, method=method)
    assert not there.k.cpu().any()


def test_the_suite_captures_every_op_on_a_second_device_and_replays_it_with_other_values() -> None:
    cases = [c for c in case_list({op: get_spec(op) for op in BUILTIN}) if c.proof == "graph"]
    assert {c.op for c in cases} == set(BUILTIN)
    with find(job_for("ascend", "device", "npu:1", silence=1800)) as worker:
        results = run(worker, cases).results
    assert not {i: r.reason for i, r in results.items() if r.outcome != PASSED}
    assert len(results) == len(cases)
