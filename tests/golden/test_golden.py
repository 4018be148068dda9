"""A recording replays; one that was tampered with doesn't, nor does a backend that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hal
from hal import golden
from hal._errors import HalError
from hal.ops import BUILTIN


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    paths = golden.record(folder, "reference", "cpu")
    assert {p.stem for p in paths} == set(golden.CHOSEN) <= set(BUILTIN)
    return folder


def test_small_enough_for_a_repository(recorded: Path) -> None:
    assert sum(p.stat().st_size for p in recorded.iterdir()) < 4 << 20


def test_replays_on_what_recorded_it(recorded: Path) -> None:
    outcomes = golden.replay(recorded, "reference", "cpu")
    assert len(outcomes) == sum(map(len, golden.CHOSEN.values()))
    assert all(o.passed for o in outcomes), [o for o in outcomes if not o.passed]
    assert {o.same for o in outcomes} == {1.0}


@pytest.mark.parametrize("op", golden.CHOSEN)
def test_a_changed_recording_fails(recorded: Path, tmp_path: Path, op: str) -> None:
    kept = torch.load(recorded / f"{op}.pt", weights_only=True)
    name, case = next(iter(kept["cases"].items()))
    part, value = next((p, t) for p, t in case["outputs"].items() if p != "workspace")
    case["outputs"][part] = flipped(value)
    kept["cases"] = {name: case}
    torch.save(kept, tmp_path / f"{op}.pt")
    (outcome,) = golden.replay(tmp_path, "reference", "cpu")
    assert not outcome.passed
    assert "recorded" in outcome.detail


def flipped(t: torch.Tensor) -> torch.Tensor:
    """Every element with another high bit: a float elsewhere by more than any bound."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return (t.contiguous().view(bits) ^ (1 << (8 * t.element_size() - 2))).view(t.dtype)


def test_a_wrong_backend_fails(recorded: Path) -> None:
    def get_last_loc(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        return torch.zeros_like(prefix_lens)

    hal.register("get_last_loc", backend="golden_wrong", devices=("cpu",))(get_last_loc)
    outcomes = [o for o in golden.replay(recorded, "golden_wrong", "cpu") if o.op == "get_last_loc"]
    assert outcomes
    assert not any(o.passed for o in outcomes)
    assert "not what the contract allows" in outcomes[0].detail


def test_a_wrong_backend_is_not_recorded(tmp_path: Path) -> None:
    def get_last_loc(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        return torch.ones_like(prefix_lens)

    hal.register("get_last_loc", backend="golden_wrong_too", devices=("cpu",))(get_last_loc)
    with pytest.raises(HalError, match="nothing was recorded for get_last_loc"):
        golden.record(tmp_path, "golden_wrong_too", "cpu")
    assert not list(tmp_path.iterdir())


def test_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(HalError, match="no recordings"):
        golden.replay(tmp_path, "reference", "cpu")


def test_another_format(recorded: Path, tmp_path: Path) -> None:
    kept = torch.load(recorded / "get_last_loc.pt", weights_only=True)
    torch.save({**kept, "format": 99}, tmp_path / "get_last_loc.pt")
    with pytest.raises(HalError, match="format 99"):
        golden.replay(tmp_path, "reference", "cpu")


def test_the_command(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main(["replay", str(recorded), "--backend", "reference", "--device", "cpu"]) == 0
    count = sum(map(len, golden.CHOSEN.values()))
    assert f"{count} passed / {count} replayed" in capsys.readouterr().out


def test_what_is_in_the_repository(request: pytest.FixtureRequest) -> None:
    """The recordings beside this file, if they have been made, hold on the reference."""
    here = Path(__file__).parent
    if not list(here.glob("*.pt")):
        pytest.skip(
            "no recordings yet: python -m hal.golden record tests/golden --backend cuda --device cuda"
        )
    assert all(o.passed for o in golden.replay(here, "reference", "cpu"))
