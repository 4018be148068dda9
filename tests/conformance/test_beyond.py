"""What the suite does beyond fixed samples: inputs nobody knew, many calls, memory that grows, a look back."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from sabotage import faults

from hal._remote.target import Bound, DirectTarget, always
from hal.conformance import _report, main
from hal.conformance._block import bits
from hal.conformance._cases import cases_of
from hal.conformance._result import FAILED, PASSED, Case
from hal.conformance._run import run_backend
from hal.conformance._truths import _tensors
from hal.conformance._verdict import Failure
from hal.conformance._verify import beyond_samples, inconsistencies
from hal.conformance.proofs import fresh, soak
from hal.conformance.proofs.run import Run, run_case
from hal.ops import BUILTIN, get_spec
from hal.ops.proofs.inputs import FLOAT_DTYPES

OP = "get_last_loc"
WIDE = [(op, name) for op in BUILTIN for name in (get_spec(op).fresh or fresh.Fresh({}, len)).wide]


def target_of(fn: Any, op: str = OP, deterministic: bool = True) -> DirectTarget:
    target = DirectTarget({op: Bound(fn, always, "x", deterministic=deterministic)})
    target.foreign = lambda op: {}  # type: ignore[method-assign]
    return target


# --- fresh inputs -----------------------------------------------------------------------------------


def test_every_op_says_what_is_wide_and_has_a_case_for_it() -> None:
    for op in BUILTIN:
        of_op = get_spec(op).fresh
        assert of_op is not None
        names = [c.name for c in cases_of(get_spec(op)) if c.proof == "fresh"]
        assert names == [*of_op.wide, "pairs", "mixed"]


def test_the_sizes_go_as_far_as_engines_do() -> None:
    least = {
        ("get_last_loc", "bs"): 8192,
        ("get_last_loc", "requests"): 65_536,
        ("get_last_loc", "width"): 16_384,
        ("assign_extend_cache_locs", "longest"): 65_536,
        ("rope_kv_write", "n"): 16_384,
        ("kv_write", "n"): 65_536,
        ("rope_kv_write", "q_heads"): 128,
        ("rope_kv_write", "slots"): 65_537,
        ("rope_kv_write", "max_positions"): 65_536,
        ("kv_transfer", "n"): 8192,
        ("kv_transfer", "src_slots"): 65_537,
        ("kv_move", "n"): 8192,
        ("decode_attention", "bs"): 8192,
        ("decode_attention", "longest"): 65_536,
        ("decode_attention", "q_heads"): 128,
    }
    for (op, name), size in least.items():
        reach = fresh.reach(get_spec(op), name, "device")
        assert min(reach) >= size, (op, name, reach)


@pytest.mark.parametrize(("op", "name"), WIDE)
@pytest.mark.parametrize("lane", ["device", "interpreter"])
def test_the_wide_one_is_always_beyond_what_is_usual(op: str, name: str, lane: str) -> None:
    usual, reach = get_spec(op).ragged.get(name, 0), fresh.reach(get_spec(op), name, lane)
    for seed in range(20):
        value = fresh.draw(get_spec(op), Random(seed), [name], lane)[name]
        assert min(reach) <= value <= max(reach)
        assert not isinstance(usual, tuple) or value > max(usual)


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    def all_of(seed: int) -> list[Any]:
        return [
            (what, tries[0])
            for op in BUILTIN
            for case in fresh.names(get_spec(op))
            for what, tries in fresh.draws(get_spec(op), case, Random(f"{seed} {op}/{case}"), "device")
        ]

    assert all_of(5) == all_of(5)
    assert all(a != b for a, b in zip(all_of(5), all_of(6), strict=True))


def test_two_wide_ones_shrink_to_what_a_machine_can_do() -> None:
    for op in BUILTIN:
        of_op = get_spec(op).fresh
        assert of_op is not None
        for seed in range(3):
            for some in [(a, b) for a in of_op.wide for b in of_op.wide if a < b]:
                params = fresh.settle(fresh.draw(get_spec(op), Random(seed), some, "device"))
                fits = of_op.size(params) <= fresh.MOST["device"]
                small = all(
                    isinstance(of_op.wide[n].sizes, list) or params[n] <= max(20, 2 * of_op.wide[n].step) for n in some
                )
                assert fits or small, (op, params)


@pytest.mark.parametrize(("seed", "mixture"), [(719, 0), (1271, 1), (1635, 4)])
def test_no_mixture_draws_pools_of_gigabytes(seed: int, mixture: int) -> None:
    """Of these seeds it did, of up to 9.6 GB, of which a case holds copies."""
    spec, case = get_spec("kv_transfer"), Case("kv_transfer", "fresh", "mixed")
    _, tries = list(fresh.draws(spec, case.name, Random(f"{seed} {case.id} device"), "device"))[mixture]
    for p in tries:
        row = p["num_layers"] * p["head_dim"] * (1 if p["mla"] else 2 * p["heads"])
        assert row * FLOAT_DTYPES[p["dtype"]].itemsize * (p["src_slots"] + p["dst_slots"]) <= 2**28


@pytest.mark.parametrize("lane", ["device", "interpreter"])
def test_several_wide_ones_are_within_the_bound_and_few_are_drawn_again(lane: str) -> None:
    assert beyond_samples([OP], lane)["fresh"]["bytes_held"] == fresh.HELD
    for op in BUILTIN:
        spec, rng = get_spec(op), Random(f"{op} {lane}")
        again = sum(fresh.held(spec, fresh.settle(fresh.mix(spec, rng, lane))) > fresh.HELD for _ in range(300))
        assert again < 30, (op, again)
        for case in (fresh.MIXED, fresh.PAIRS):
            for what, tries in (d for _ in range(3) for d in fresh.draws(spec, case, rng, lane)):
                for params in tries:
                    assert fresh.held(spec, params) <= fresh.HELD, (op, what, params)


@pytest.mark.parametrize("op", BUILTIN)
def test_what_is_held_is_about_what_arguments_and_truth_take(op: str) -> None:
    spec, rng = get_spec(op), Random(op)
    mixtures = [fresh.settle(fresh.mix(spec, rng, "device")) for _ in range(50)]
    # The largest of those that cost a test little; a slot that comes again has a truth for each time.
    for params in sorted((p for p in mixtures if fresh.held(spec, p) < 2**25), key=partial(fresh.held, spec))[-3:]:
        arguments = spec.make(**params)
        storages = (t.untyped_storage() for t in _tensors((arguments, spec.oracle(arguments))))
        assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) < 2 * fresh.held(spec, params), params


def test_drawing_ends_with_the_smallest_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "HELD", -1)
    spec, drawn = get_spec("kv_transfer"), []

    def once() -> dict[str, Any]:
        drawn.append(fresh.settle(fresh.mix(spec, Random(len(drawn)), "device")))
        return drawn[-1]

    least = fresh.fitting(spec, once)
    assert len(drawn) == fresh.TRIES
    assert fresh.held(spec, least) == min(fresh.held(spec, p) for p in drawn)


def test_a_slow_lane_is_scaled_down_and_says_so() -> None:
    full, less = beyond_samples([OP], "device"), beyond_samples([OP], "interpreter")
    assert full["fresh"]["scale"] == "full"
    assert less["fresh"]["scale"] == f"ranges / {fresh.SLOWER}: lane interpreter"
    assert max(less["fresh"]["reach"][OP]["bs"]) < min(full["fresh"]["reach"][OP]["bs"])
    assert less["soak"]["calls"] < full["soak"]["calls"]
    assert less["soak"]["one_in_a_thousand_escapes"] > 0.5
    assert full["soak"]["one_in_a_thousand_escapes"] < 1e-4


@pytest.mark.parametrize("seed", range(6))
def test_a_limit_in_one_dimension_alone_is_hit_whatever_the_seed(seed: int) -> None:
    good = get_spec(OP).reference

    def limited(bs: int, rows: int, width: int) -> Any:
        def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
            out = good(req_to_token[:rows, :width], req_pool_indices, prefix_lens)
            out[bs:] = -1
            return out

        return target_of(run)

    far = 10**9
    for name, limits in (("bs", (2048, far, far)), ("requests", (far, 65_535, far)), ("width", (far, far, 8192))):
        result = run_case(Case(OP, "fresh", name), limited(*limits), get_spec(OP), seed=seed)
        assert result.outcome == FAILED
        assert f"beyond the samples, {name} wide (" in result.reason
        assert "replay('get_last_loc'" in result.snippet


def test_the_report_has_the_seed_and_is_held_to_what_its_lane_is_due(tmp_path: Path) -> None:
    assert main("reference", ops=["alloc_decode"], report=tmp_path, quiet=True, seed=77) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["beyond_samples"]["seed"] == 77
    assert "seed 77" in _report.terminal(report)
    assert inconsistencies(report) == ([], [])
    report["beyond_samples"]["soak"]["calls"] = 10
    (wrong,), _ = inconsistencies(report)
    assert wrong.startswith("beyond_samples: the suite does")


LIMITED = """
import hal
from sabotage._healthy import copy_of

good = copy_of("get_last_loc")


@hal.register("get_last_loc", backend="limited")
def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    out = good(req_to_token, req_pool_indices, prefix_lens)
    out[2048:] = -1
    return out
"""


def test_the_worker_draws_from_the_seed_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    monkeypatch.chdir(tmp_path)
    case = Case(OP, "fresh", "bs")
    said = []
    for seed in (1, 1, 2):
        outcome = run_backend("limited", "device", [OP], [case], imports=["limited"], seed=seed)
        assert not outcome.fatal
        said.append(outcome.results[case.id].reason.partition(")")[0])
    assert said[0] == said[1] != said[2]
    assert "bs wide" in said[0]


# --- many calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BUILTIN)
def test_copies_hold_the_sample_and_are_restored(op: str) -> None:
    run = Run(target_of(get_spec(op).reference, op), get_spec(op), Case(op, "soak", "all"))
    arguments = run.make(**run.busy[0].params)
    with run.caller.arena.borrow():
        copies = soak.ArgumentCopies(run, arguments, 3)
        assert 2 <= len(copies.placed) <= 3
        for placed in copies.placed:
            for name, value in placed.values.items():
                if isinstance(value, torch.Tensor) and name not in run.outputs:
                    assert torch.equal(bits(value), bits(arguments[name]))
                    assert value.stride() == arguments[name].stride()
        copies.words.fill_(7)
        copies.restore()
        assert all(b.changes(None) is None for placed in copies.placed for b in placed.all())


def test_a_guard_zone_is_looked_at_in_every_call() -> None:
    good, calls = get_spec("assign_extend_cache_locs").reference, 0

    def run(req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any) -> Any:
        nonlocal calls
        calls += 1
        good(req_to_token, req_pool_indices, start_offsets, end_offsets, out)
        if calls == 50:
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[0]).fill_(-7)
        return out

    op = "assign_extend_cache_locs"
    result = run_case(Case(op, "soak", "all"), target_of(run, op), get_spec(op))
    assert result.outcome == FAILED
    assert "after 49 right calls" in result.reason
    assert "bytes written outside the tensor" in result.reason


def test_other_bits_that_are_right_are_no_fault_of_what_is_not_declared_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (fault,) = [f for f in faults() if f.name == "another order of sums in one call of 1000"]
    bound, op = fault.make(), "decode_attention"
    monkeypatch.setitem(soak.CALLS, "device", 300)  # the first comes within 131
    for deterministic, outcome in ((True, FAILED), (False, PASSED)):
        target = target_of(bound.fn, op, deterministic)
        assert run_case(Case(op, "soak", "all"), target, get_spec(op)).outcome == outcome


# --- later ------------------------------------------------------------------------------------------


def test_inputs_and_results_are_looked_at_after_one_pause() -> None:
    good, late = get_spec(OP).reference, []

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        late.append(prefix_lens)
        return good(req_to_token, req_pool_indices, prefix_lens)

    pauses = []

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        late[3][:1] += 1

    with pytest.raises(Failure, match=r"and 1 s later no more: prefix_lens\[0\]: changed"):
        soak.later(Run(target_of(run), get_spec(OP), Case(OP, "later", "all")), wait)
    assert pauses == [soak.LATER]
    soak.later(Run(target_of(good), get_spec(OP), Case(OP, "later", "all")), pauses.append)
