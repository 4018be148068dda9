"""Plans: one key for a call's launches, in C and in Python; what is started by them, and when not."""

import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch.planned import WARM, A, B, Rig, rig, second
from launch.rig import BASE, CPU, EMPTY, Driver, helper
from triton import knobs

from hal.backends.cuda import _device
from hal.ops import BUILTIN, get_spec
from hal.triton import launch
from hal.triton.plans import COUNTERS, MOST, STEPS, Counters, Plan, Result, Step, key_of, length, plans

__all__ = ["helper", "rig"]


def changed(rig: Rig, change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> None:
    """Has the op start other steps from now on."""
    make = rig.plans.make

    def changed(*args: Any) -> Plan:
        plan = make(*args)
        return plan._replace(steps=change(plan.steps))

    rig.plans.make = changed


def test_a_warm_call_starts_what_the_first_one_did(rig: Rig) -> None:
    assert rig(A, B) == []
    assert [(name, grid) for name, grid, _ in rig.slow] == [("first", (9, 1, 1)), ("second", (128, 1, 1))]
    a, b, part, n, m, scale = rig.slow[0][2]
    assert (a is A, b is B, part.data_ptr(), n, m, scale) == (True, True, rig.lent[COUNTERS:].data_ptr(), 12, 3, 0.5)
    assert rig.slow[1][2][1].data_ptr() == rig.lent[COUNTERS + 32 :].data_ptr()
    assert rig(A, B) == WARM
    values = [[int.from_bytes(v, "little") for v in values] for _, _, values in rig.driver.started]
    assert values[0][:3] == [A.data_ptr(), B.data_ptr(), rig.lent[COUNTERS:].data_ptr()]
    assert values[0][3] % 2**32 == 12
    assert values[1][:3] == [B.data_ptr(), rig.lent[COUNTERS + 32 :].data_ptr(), 256]
    # Other lengths, pointers and numbers are no other kind.
    assert rig(BASE[512:544].view(1, 32), BASE[128:224], 0.25) == [(7, (7, 1, 1)), (8, (96, 1, 1))]
    assert len(rig.made) == 1
    assert len(rig.slow) == 2


def test_a_new_result_has_the_sizes_of_its_own_call(rig: Rig) -> None:
    make = rig.plans.make
    rig.plans.make = lambda *args: make(*args)._replace(returns=Result("a", 5, torch.float16))
    rig.driver.count = {7: 6, 8: 3}
    found = [rig.plans.start(a, B, 0.5, 3) for a in (A, A, A[:3], A[:3], A, BASE[512:544].view(1, 32))]
    assert len(rig.slow) == 2  # the first call alone
    assert [(x.shape, x.stride(), x.dtype) for x in found] == [
        ((n, 5), (5, 1), torch.float16) for n in (8, 8, 3, 3, 8, 1)
    ]
    assert len({x.data_ptr() for x in found}) == len(found)


@pytest.mark.parametrize(
    "other",
    [
        (BASE[:512].view(8, 64)[:, :32], B, 0.5, 3),
        (BASE[:128].view(8, 16), B, 0.5, 3),
        (BASE[8:264].view(8, 32), B, 0.5, 3),
        (A.view(torch.int8), B, 0.5, 3),
        (A.view(1, 8, 32), B, 0.5, 3),
        (A, BASE[0:128], 0.5, 3),
        (A, B, -0.5, 3),
        (A, B, 0.0, 3),
        (A, B, 1, 3),
        (A, B, 0.5, 4),
        (A, B, 0.5, True),
        (A, B, 0.5, None),
    ],
    ids=["stride", "size", "alignment", "dtype", "rank", "alias", "sign", "zero", "int", "value", "bool", "none"],
)
def test_what_a_plan_may_depend_on_is_in_both_keys(rig: Rig, other: tuple[Any, ...]) -> None:
    base = (A, B, 0.5, 3)
    assert key_of(base) != key_of(other)
    rig(*base)
    assert rig(*base) == WARM
    for args in (base, (A, B, 0.5, 1), (A, B, 0.5, 0)):
        rig(*args)
    count = len(rig.made)
    rig(*other)
    assert len(rig.made) == count + 1


def test_two_devices_share_no_plan(rig: Rig) -> None:
    on_meta = (A.to("meta"), B.to("meta"), 0.5, 3)
    assert key_of((A, B, 0.5, 3))[0][0][1:3] == key_of(on_meta)[0][0][1:3]
    assert key_of((A, B, 0.5, 3)) != key_of(on_meta)


def test_a_launch_that_is_not_due_is_made_ready_and_not_started(rig: Rig) -> None:
    few = BASE[256:320]
    rig(A, few)
    assert [name for name, *_ in rig.slow] == ["first"]
    assert [name for name, *_ in rig.prepared] == ["second"]
    assert rig(A, few) == [(7, (5, 1, 1))]
    assert rig(A, B) == WARM
    assert len(rig.made) == 1


def test_a_launch_of_no_programs_is_made_ready_too(rig: Rig) -> None:
    """Else the first call that has some waits for the compiler."""
    changed(rig, lambda steps: (steps[0], steps[1]._replace(grid=length("b") + -128)))
    rig(A, B)
    assert [name for name, *_ in rig.slow] == ["first"]
    assert [name for name, *_ in rig.prepared] == ["second"]
    assert rig(A, B) == [(7, (9, 1, 1))]
    assert rig(A, BASE[256:448]) == [(7, (13, 1, 1)), (8, (64, 1, 1))]
    assert len(rig.slow) == 1


def test_a_plan_has_as_many_launches_as_c_has_room_for(rig: Rig) -> None:
    changed(rig, lambda steps: steps[1:] * STEPS)
    rig(A, B)
    assert rig(A, B) == WARM[1:] * STEPS
    assert len(rig.made) == rig.by_python == 1
    rig.plans.clear()
    changed(rig, lambda steps: (*steps, steps[0]))
    with pytest.raises(ValueError, match=r"at most 16 launches was expected, not of 17"):
        rig(A, B)


def test_nothing_is_started_in_part(rig: Rig) -> None:
    """Of two launches the second is not to be started by C: no launch happens twice."""
    rig(A, B)
    rig.slow.clear()
    next(iter(rig.plans.values())).steps[1].run.kernel.jit.pre_run_hooks.append(print)
    assert rig(A, B) == [(7, (9, 1, 1))]
    assert [name for name, *_ in rig.slow] == ["second"]


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize("what", ["subclass", "context", "capture", "scratch", "long"])
def test_what_is_not_as_before_goes_by_python(rig: Rig, what: str) -> None:
    a, b = A, B
    rig(a, b)
    assert rig(a, b) == WARM
    assert rig.by_python == 1
    if what == "subclass":
        a = a.as_subclass(Mine)
    elif what == "context":
        rig.driver.device = 1
    elif what == "capture":
        rig.driver.capturing = 1
    elif what == "scratch":
        a = BASE[:1].view(1, 1).expand(4096, 32)
    else:
        a = BASE[:1].view(1, 1).expand(MOST + 1, 32)
        with pytest.raises(ValueError, match="too long"):
            rig(a, b)
        return
    rig.slow.clear()
    started = [f for f, _ in rig(a, b)]
    # By Python the launches are warm or cold each for itself.
    assert [*({"first": 7, "second": 8}[name] for name, *_ in rig.slow), *started] == [7, 8]
    assert rig.by_python == 2


def test_a_parameter_is_a_tensor(rig: Rig) -> None:
    p = torch.nn.Parameter(A, requires_grad=False)
    rig(p, B)
    assert rig(p, B) == WARM
    assert rig(A, B) == WARM


def test_forgotten_plans_are_made_again(rig: Rig) -> None:
    rig(A, B)
    assert rig(A, B) == WARM
    launch.forget()
    assert not rig.plans
    rig(A, B)
    assert len(rig.made) == 2
    assert rig(A, B) == WARM


def test_without_the_helper_python_does_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_helper", lambda: None)
    for _ in range(2):
        assert rig(A, B) == []
    assert [name for name, *_ in rig.slow] == ["first", "second"] * 2
    assert len(rig.made) == 1


def test_a_failed_launch_is_told(rig: Rig) -> None:
    rig(A, B)
    rig.driver.code = 719
    with pytest.raises(RuntimeError, match="719"):
        rig(A, B)


def test_a_captured_graph_has_counters_of_its_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for all its launches on a stream, no other's; without any to spare they are cleared."""
    scratch = torch.ones(2 * COUNTERS, dtype=torch.float32, device="cpu")
    assert not rig.plans._counters(scratch)[:COUNTERS].any()
    assert bool(scratch[COUNTERS:].all())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    on_device: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    assert rig.plans._counters(on_device) is on_device
    spare = torch.zeros(3, COUNTERS, dtype=torch.float32, device="cpu").unbind()
    rig.plans._spare = {0: list(spare)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    given = []
    for capture in ((1, 7), (1, 7), (2, 7), (1, 8)):
        monkeypatch.setattr(launch, "_capture", lambda device, capture=capture: capture)
        given.append(rig.plans._counters(on_device).data_ptr())
    assert given[0] == given[1]
    assert set(given) == {t.data_ptr() for t in spare}


def test_counters_are_asked_for_by_who_counts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is only prepared asks for none: in a graph they might have to be cleared."""
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(rig.plans, "_counters", lambda scratch: asked.append(scratch) or scratch)
    rig(A, B)
    assert not asked
    changed(rig, lambda steps: (steps[0], steps[1]._replace(args=("b", Counters(), length("b")))))
    rig.plans.clear()
    rig(A, B[:32])
    assert not asked
    rig.plans.clear()
    rig(A, B)
    assert len(asked) == 1


def test_threads_start_their_pairs_together(rig: Rig) -> None:
    """They share a scratch: another's launch in between would write over it."""
    rig(A, B)
    rig(A, B)
    rig.driver.started.clear()
    threads = [threading.Thread(target=lambda: [rig.plans.start(A, B, 0.5, 3) for _ in range(50)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [f for f, *_ in rig.driver.started] == [7, 8] * 200


def test_numbers_are_the_same_in_c(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = length("a"), length("b")
    numbers = (
        a + -3,
        a.times(b),
        a.per(b),
        b.within(a),
        a.at_least(20),
        a.at_most(20),
        (a + b).log2(),
        a.doubled(b.log2()),
        (a + b).per(8).at_least(1).within(132).at_least(1).at_most(b.per(3)).log2(),
    )
    kernel = launch.jit(do_not_specialize=("n",))(second)
    for number in numbers:
        monkeypatch.setattr(
            rig.plans, "make", lambda *_, n=number: Plan((Step(kernel.bind(BLOCK=64), n, ("b", "a", n)),))
        )
        rig.plans.clear()
        rig(A, B)
        for x, y in ((A, B), (BASE[512:544].view(1, 32), BASE[128:224]), (BASE[:992].view(31, 32), BASE[992:999])):
            want = number.value({"a": len(x), "b": len(y)})
            if want >= 1:
                assert rig(x, y) == [(8, (want, 1, 1))]
                assert int.from_bytes(rig.driver.started[0][2][2], "little") == want


class Counted(plans):
    by_python = 0

    def _start(self, call: Any, *args: Any) -> Any:
        self.by_python += 1
        return super()._start(call, *args)

    def _workspace(self, device: torch.device, size: int) -> torch.Tensor:
        return self._scratch.setdefault((0, 0), torch.zeros(1 << 20, dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("op", [op for op in BUILTIN if op not in ("kv_transfer", "kv_move")])
def test_c_starts_what_every_op_plans(helper: Any, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """No plan is larger than there is room for: the second call of a kind is not Python's."""
    driver = Driver()
    helper.drive(CPU, *driver.addresses(), knobs.runtime, knobs.compilation, EMPTY)
    monkeypatch.setattr(launch, "_helper", lambda: helper)
    monkeypatch.setattr(launch, "lane", lambda: "device")
    monkeypatch.setattr(_device, "_arch", lambda device: 90)

    def run(bound: launch.Launch, grid: Any, args: tuple[Any, ...], warmup: bool = False) -> None:
        codes = "".join("-" if a is None else {int: "l", float: "f"}.get(type(a), "p") for a in args)
        bound.native.add(args, 7, 4, 96, True, codes)

    monkeypatch.setattr(launch.Launch, "_run", run)
    launch.forget()
    made = Counted(importlib.import_module(f"hal.backends.cuda.{op}")._plans.make)
    spec = get_spec(op)
    for sample in [s for s in spec.samples if not s.large and s.control is None][::4]:
        args = (*spec.bind(**spec.make(**sample.params)).values(),)
        made.start(*args)
        known = made.by_python
        driver.started.clear()
        made.start(*args)
        assert made.by_python == known
        assert driver.started
    launch.forget()
