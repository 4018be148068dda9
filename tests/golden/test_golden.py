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
    assert {o.same for o in outcomes if not equal_slots(o.op, o.case)} == {1.0}


def equal_slots(op: str, case: str) -> bool:
    """Which of several rows a slot gets is nobody's to say: torch's threads race for it."""
    s = hal.ops.get_spec(op)
    params = next(x.params for x in s.samples if x.name == case)
    want = s.oracle(s.make(seed=2026, **params))
    return any(len(w.candidates) > 1 for w in golden._parts(want).values())


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


def test_what_a_backend_does_not_do_is_not_run(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither passed nor failed; what it does do decides."""

    def refuses(sig: Any) -> str | None:
        return "no int64" if sig["prefix_lens"].dtype == torch.int64 else None

    reference = hal.ops.get_spec("get_last_loc").reference
    hal.register("get_last_loc", backend="golden_half", devices=("cpu",), supports=refuses)(reference)
    outcomes = golden.replay(recorded, "golden_half", "cpu")
    declined = [o for o in outcomes if not o.ran]
    assert {o.detail for o in declined if o.op == "get_last_loc"} == {"rejected: no int64"}
    assert {o.detail.partition(":")[0] for o in declined if o.op != "get_last_loc"} == {"unimplemented"}
    assert not any(o.passed for o in declined)
    ran = [o for o in outcomes if o.ran]
    assert {o.op for o in ran} == {"get_last_loc"}
    assert all(o.passed for o in ran)
    command = ["replay", str(recorded), "--backend", "golden_half", "--device", "cpu"]
    assert golden.main(command) == 0
    told = capsys.readouterr().out
    assert (
        f"{len(ran)} passed / {len(ran)} replayed / {len(outcomes)} recorded: {len(declined)} not run" in told
    )


def test_exit_codes(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 where something failed, 2 for a name that nobody has, 3 where nothing ran; one that breaks has failed."""
    spec = hal.ops.get_spec("kv_write")

    def breaks(sig: Any) -> str | None:
        raise OSError("lost")

    hal.register("kv_write", backend="golden_breaks", devices=("cpu",), supports=breaks)(spec.reference)
    hal.register("kv_write", backend="golden_refuses", devices=("cpu",), supports=lambda sig: "never")(
        spec.reference
    )
    hal.register("kv_write", backend="golden_idle", devices=("cpu",))(lambda *args, **kwargs: None)
    (tmp_path / "kv_write.pt").write_bytes((recorded / "kv_write.pt").read_bytes())

    def replayed(backend: str) -> int:
        return golden.main(["replay", str(tmp_path), "--backend", backend, "--device", "cpu"])

    assert replayed("golden_breaks") == 1
    assert "broken" in capsys.readouterr().out
    assert replayed("golden_refuses") == 3
    assert "0 passed / 0 replayed / 3 recorded: 3 not run" in capsys.readouterr().out
    assert replayed("golden_idle") == 1
    assert replayed("golden_idel") == 2
    assert "did you mean golden_idle" in capsys.readouterr().err


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
