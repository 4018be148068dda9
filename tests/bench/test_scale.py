"""The model of moving or computing KV, and the simulation made of it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from hal.bench import scale

SHAPES = list(scale.SHAPES.values())
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"


def test_bytes_a_token() -> None:
    assert {n: s.bytes_a_token for n, s in scale.SHAPES.items()} == {
        "Llama-3.1-8B": 2 * 32 * 8 * 128 * 2,
        "Llama-3.1-70B": 2 * 80 * 8 * 128 * 2,
        "Qwen3-30B-A3B": 2 * 48 * 4 * 128 * 2,
        "DeepSeek-V2-Lite": 27 * 576 * 2,
    }


def test_the_model_gives_what_was_measured() -> None:
    """The first point made the rate; the second, of another length, is the check."""
    llama = scale.SHAPES["Llama-3.1-8B"]
    assert llama.compute(4096) == pytest.approx(0.1007, rel=0.01)
    assert llama.compute(7000) == pytest.approx(0.1794, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"])
def test_no_prefill_was_quicker_than_the_model(name: str) -> None:
    """So a link that is fast enough by the model is fast enough."""
    files = sorted((ROOT / "bench" / "results").glob(f"h200-vllm-{name.lower()}*.json"))
    runs = [run for file in files for run in json.loads(file.read_text())["runs"]]
    times = [(t["tokens"], t["ms"] * 1e-3) for run in runs for t in run["ttft"]]
    assert {4096, 32768} <= {n for n, _ in times}
    for tokens in {n for n, _ in times}:
        measured = [seconds for n, seconds in times if n == tokens]
        assert all(scale.SHAPES[name].compute(tokens) / seconds < 1.02 for seconds in measured)
        # A busy host makes a short prompt as slow as it likes, but not every one.
        assert scale.SHAPES[name].compute(tokens) / min(measured) > 0.4


@pytest.mark.parametrize("shape", SHAPES)
def test_both_break_evens_are_where_the_times_are_equal(shape: scale.Shape) -> None:
    for tokens in (100, 4096, 100_000):
        assert shape.move(tokens, shape.breaks_even(tokens)) == pytest.approx(shape.compute(tokens))
    for link in (5, 10, 25):
        tokens = shape.longer_than(link)
        if tokens:
            assert shape.move(tokens, link, page=1) == pytest.approx(shape.compute(tokens))
            assert shape.move(2 * tokens, link) < shape.compute(2 * tokens)
        else:
            assert shape.move(1, link) <= shape.compute(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_and_the_rest_are_the_whole(shape: scale.Shape) -> None:
    assert shape.compute(3000) + shape.compute(1000, cached=3000) == pytest.approx(shape.compute(4000))


def test_a_page_has_its_price() -> None:
    llama = SHAPES[0]
    assert llama.move(33, 100, page=16, a_page=1.0) == pytest.approx(llama.move(33, 100) + 3)


def test_arrivals_have_the_traces_statistics() -> None:
    drawn = scale.Arrivals().draw(20_000, 100.0, random.Random(1))
    total = [before + new for _, _, before, new in drawn]
    assert drawn == sorted(drawn, key=lambda r: r[0])
    assert drawn[-1][0] == pytest.approx(200, rel=0.05)
    assert sum(total) / len(total) == pytest.approx(12_035, rel=0.1)
    assert sum(r[2] for r in drawn) / sum(total) == pytest.approx(0.374, abs=0.03)
    assert sum(not r[2] for r in drawn) / len(drawn) == pytest.approx(7373 / 12031, abs=0.02)


def row(rows: list[dict[str, Any]], policy: str) -> dict[str, Any]:
    return next(r for r in rows if r["policy"] == policy)


def test_simulation() -> None:
    rows = scale.simulate([200], count=4000, rate=1500.0, seed=3)
    assert rows == scale.simulate([200], count=4000, rate=1500.0, seed=3)
    assert rows != scale.simulate([200], count=4000, rate=1500.0, seed=4)
    # Now and then the balance finds the prefix by chance.
    assert row(rows, "recompute")["again"] > 0.98
    assert row(rows, "recompute")["moved"] == 0
    assert row(rows, "move")["here"] < 0.05 < row(rows, "move")["moved"]
    assert row(rows, "model")["here"] > 0.3
    for policy in ("move", "model"):
        assert row(rows, policy)["gpu_seconds"] < row(rows, "recompute")["gpu_seconds"]
    assert row(rows, "model")["median"] <= row(rows, "recompute")["median"]


def test_a_cache_that_is_too_small_keeps_nothing() -> None:
    requests = scale.Arrivals().draw(500, 50.0, random.Random(0))
    cluster = scale.Cluster(100, cache_bytes=0.0)
    waits = cluster.run(requests, random.Random(0))
    assert len(waits) == 500
    assert min(waits) > 0
    assert cluster.ways["here"] == cluster.ways["moved"] == 0
    assert not cluster.holder


def test_an_empty_cluster_waits_for_nobody() -> None:
    """One request alone: prefill, then one transfer."""
    cluster = scale.Cluster(100)
    (wait,) = cluster.run([(5.0, 0, 0, 1000)], random.Random(0))
    assert wait == pytest.approx(cluster.shape.compute(1000) + cluster.shape.move(1000, 100))


def test_program_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(300, 1500.0, 0, None) == 0
    said = capsys.readouterr().out
    assert scale.table() in said
    head = re.search(r"^ Gb/s policy.*$", PAGE.read_text("utf-8"), re.M)
    assert head is not None
    assert head[0] in said
    assert said.count("\n") > 18
