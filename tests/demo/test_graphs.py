"""Decode steps as replays of graphs: a stand-in for CUDA's, the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal

pytest.importorskip("transformers", reason="needs the extra `demo`")

from demo_llama import assert_nothing_held, assert_same_tokens, engine, prompts

from hal.demo.graphs import unsafe

pytestmark = pytest.mark.filterwarnings("ignore::hal.FallbackWarning")


class Recorder:
    """Stands in for a CUDA graph: runs once, then again on the same buffers, into the same tensor."""

    def __init__(self) -> None:
        self.recorded = 0
        self.sizes: list[int] = []

    def __call__(self, run: Any) -> Any:
        self.recorded += 1
        made = torch.zeros_like(run())

        def again() -> None:
            self.sizes.append(len(made))
            made.copy_(run())

        return made, again


@pytest.fixture
def capturable() -> Any:
    """Ops that a graph may hold."""
    with hal.use("reference"):
        yield


@pytest.mark.usefixtures("capturable")
def test_decode_steps_are_replays_and_the_tokens_the_same() -> None:
    record = Recorder()
    e = engine(slots=240, running=5, record=record)
    requests = [e.add(p, 9 + 4 * i) for i, p in enumerate(prompts(6))]
    for _ in range(4):
        e.step()
    e.preempt(requests[1])
    e.run()
    assert e.graphs is not None
    assert e.graphs.why_not == ""
    assert e.graphs.sizes == [1, 2, 4, 5]
    # 4 is used for 3 requests too, and each size is recorded once.
    assert set(record.sizes) == {1, 2, 4, 5}
    assert record.recorded == 4
    assert e.graphs.replayed == len(record.sizes)
    assert e.graphs.replayed > e.steps - 5
    assert_same_tokens(requests)
    assert_nothing_held(e)


@pytest.mark.usefixtures("capturable")
def test_a_padded_batch_writes_nothing_beyond_its_requests() -> None:
    e = engine(running=5, record=Recorder())
    requests = [e.add(p, 12) for p in prompts(3)]
    e.step()
    e.step()
    assert e.graphs is not None
    batch = e.graphs.batch(3)
    assert batch is not None
    assert batch.slots.tolist()[3:] == batch.positions.tolist()[3:] == [-1]
    assert batch.kv_indptr[3] == batch.kv_indptr[4]
    mine = {s for r in requests for s in e.cache.slots(r.row or 0, 0, r.cached).tolist()}
    written = {i for i, row in enumerate(e.cache.pool.k[0]) if row.any()}
    assert written == mine


@pytest.mark.usefixtures("capturable")
def test_without_a_graph_the_engine_goes_on_and_says_why() -> None:
    def fails(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    e = engine(record=fails)
    requests = [e.add(p, 6) for p in prompts(3)]
    e.run()
    assert e.graphs is not None
    assert e.graphs.replayed == 0
    assert e.graphs.why_not.startswith("capturing 3 requests failed: operation not permitted")
    assert_same_tokens(requests)


def test_what_is_not_declared_graph_safe_is_not_captured() -> None:
    e = engine()
    calls = e.model.examples(e.cache.pool)
    with hal.use("reference"):
        assert unsafe(calls, "rope_kv_write", "decode_attention") == ""
    fn = hal.registry.table()["decode_attention"]["reference"][0][0].fn
    for name, safe in (("no", False), ("yes", True)):
        hal.register("decode_attention", backend="mine", name=name, graph_safe=safe)(fn)
    try:
        with hal.use("decode_attention=mine/no"):
            assert unsafe(calls, "decode_attention") == (
                "decode_attention runs on mine/no, which is not declared graph-safe"
            )
        with hal.use("decode_attention=mine/yes"):
            assert unsafe(calls, "decode_attention") == ""
        record = Recorder()
        with hal.use("decode_attention=mine/no"):
            e = engine(record=record)
            e.add(prompts(1)[0], 4)
            e.run()
        assert record.recorded == 0
    finally:
        hal.unregister("mine")
    with hal.use("ascend"):
        assert unsafe(calls, "decode_attention") == "nothing runs decode_attention"
