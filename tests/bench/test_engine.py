"""`hal bench engine`: an engine that is not the one asked for is no row; engines on one device take turns."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hal import HalError
from hal.bench import vllm


@pytest.mark.parametrize(
    ("engine", "attention"),
    [
        ("hal", ["FlashAttnMLAImpl"]),
        ("hal", ["FlashAttentionImpl", "HalAttentionImpl"]),
        ("hal", []),
        ("stock", ["HalMLAImpl"]),
    ],
)
def test_an_engine_that_is_not_the_one_asked_for_is_refused(engine: str, attention: list[str]) -> None:
    with pytest.raises(HalError, match=f"expected {engine}'s attention"):
        vllm.check_engine(engine, {"attention": attention, "rotary": []})


@pytest.mark.parametrize(("engine", "attention"), [("hal", "HalMLAImpl"), ("stock", "FlashAttnMLAImpl")])
def test_the_one_asked_for_is_taken(engine: str, attention: str) -> None:
    vllm.check_engine(engine, {"attention": [attention], "rotary": []})


def test_points_take_turns_and_nobody_waits_for_who_ended(tmp_path: Path) -> None:
    points = {"hal": 4, "stock": 2}
    for engine in points:
        (tmp_path / engine).touch()
    order: list[str] = []

    def run(engine: str) -> None:
        turns = vllm._Turns(str(tmp_path), engine)
        for _ in range(points[engine]):
            with turns:
                order.append(engine)
        (tmp_path / f"{engine}.end").touch()

    threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in points]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert order == ["hal", "stock", "hal", "stock", "hal", "hal"]
