"""A dispatched call is read once: selection and checks know it by that, and so does its plan, which it is handed to."""

import functools
import threading
from typing import Any

import pytest
import torch
import triton.language as tl
from launch.rig import CPU, EMPTY, Driver, helper
from torch import Tensor
from triton import knobs

import hal
from hal._remote.watch import code_of, watch
from hal.ops import _native
from hal.ops._native import taker_of
from hal.triton import launch
from hal.triton.plans import RESULT, Plan, Result, Step, length, plans

__all__ = ["helper"]


def kernel(table, requests, lens, out, n, BLOCK: tl.constexpr):
    pass


class Rig:
    """The backend ``planned`` of get_last_loc on CPU tensors, started by a driver that only writes down."""

    def __init__(self, helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = Driver()
        self.driver.count = 5
        helper.drive(CPU, *self.driver.addresses(), knobs.runtime, knobs.compilation, EMPTY)
        monkeypatch.setattr(launch, "_helper", lambda: helper)
        monkeypatch.setattr(launch, "lane", lambda: "device")
        self.slow: list[Any] = []

        def run(bound: launch.Launch, grid: Any, args: tuple[Any, ...], warmup: bool = False) -> None:
            self.slow.append(args)
            bound.native.add(args, 7, 4, 96, True, "ppppl")

        monkeypatch.setattr(launch.Launch, "_run", run)
        bound = launch.jit(do_not_specialize=("n",))(kernel).bind(BLOCK=64)

        @plans
        def made(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Plan:
            args = ("req_to_token", "req_pool_indices", "prefix_lens", RESULT, req_to_token.stride(0))
            return Plan((Step(bound, length("prefix_lens"), args),), returns=Result("prefix_lens"))

        @made.launcher
        def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
            return made.start(req_to_token, req_pool_indices, prefix_lens)  # type: ignore[no-any-return]

        self.plans, self.launcher = made, get_last_loc
        hal.register("get_last_loc", backend="planned", devices=("cpu",))(get_last_loc)
        # What reads a call by itself, bound; a call that was read goes past it.
        monkeypatch.setattr(made, "start", lambda *args: pytest.fail("read again"))

    def __call__(self, *args: Any, **more: Any) -> tuple[list[int], Any]:
        """The grids that the driver was told to start, and what came back."""
        self.driver.started.clear()
        out = hal.get_last_loc(*args, backend="planned", **more)
        return [c[0] for _, c, _ in self.driver.started], out


@pytest.fixture
def rig(helper: Any, fresh: None, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv("HAL_PLUGINS", "none")
    return Rig(helper, monkeypatch)


TABLE = torch.zeros(8, 64, dtype=torch.int32)
ONE = torch.zeros(1, dtype=torch.int64)
THREE = torch.zeros(3, dtype=torch.int64)


def test_a_call_is_read_once(rig: Rig) -> None:
    cold, out = rig(TABLE, THREE, THREE)
    assert (cold, len(rig.slow)) == ([], 1)
    assert (out.shape, out.dtype) == (THREE.shape, THREE.dtype)
    warm, out = rig(TABLE, THREE, THREE)
    assert (warm, len(rig.slow)) == ([3], 1)
    values = [int.from_bytes(v, "little") for v in rig.driver.started[0][2]]
    assert values == [TABLE.data_ptr(), THREE.data_ptr(), THREE.data_ptr(), out.data_ptr(), 64]
    # Of another length it is the same kind; of another table it is another plan of the same kind.
    assert rig(TABLE, ONE, ONE)[0] == [1]
    assert len(rig.plans) == 1
    rig(TABLE, ONE, ONE.clone())
    rig(torch.zeros(4, 32, dtype=torch.int32), ONE, ONE)
    assert len(rig.plans) == 3


def test_what_is_checked_stays_checked(rig: Rig) -> None:
    rig(TABLE, THREE, THREE)
    for wrong in (
        (TABLE, THREE, ONE),
        (TABLE.long(), THREE, THREE),
        (TABLE, THREE, THREE.float()),
        (TABLE, THREE, None),
    ):
        with pytest.raises(hal.ArgumentError):
            rig(*wrong)
    hal.configure(checks="full")
    with pytest.raises(hal.ArgumentError):
        rig(TABLE, THREE + 9, THREE)
    rig(TABLE, THREE, THREE)
    assert rig(TABLE, THREE, THREE)[0] == [3]
    with pytest.warns(hal.FallbackWarning):
        bound = hal.bind("cpu", "get_last_loc=planned", checks="args").get_last_loc
    rig.driver.started.clear()
    for _ in range(2):
        assert bound(TABLE, THREE, THREE).shape == THREE.shape
    assert len(rig.driver.started) == 2
    with pytest.raises(hal.ArgumentError):
        bound(TABLE, THREE, ONE)


def test_what_is_not_plain_is_read_by_the_plan(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python makes its key, and the backend's plan is found all the same."""
    none = THREE[:0]
    assert rig(TABLE, none, none)[1].shape == (0,)
    rig(TABLE, THREE, THREE)
    with torch.autograd.forward_ad.dual_level():
        rig(TABLE, THREE, THREE)
        assert rig(TABLE, THREE, THREE)[0] == [3]


def test_what_wraps_a_launcher_is_called(rig: Rig) -> None:
    called: list[int] = []

    @functools.wraps(rig.launcher)
    def around(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return torch.empty_like(args[2] if len(args) > 2 else kwargs["prefix_lens"])

    hal.register("get_last_loc", backend="around", devices=("cpu",))(around)
    for _ in range(2):
        hal.get_last_loc(TABLE, THREE, THREE, backend="around")
    assert called == [1, 1]
    assert taker_of(around) is None
    assert taker_of([].append) is None


def test_plans_that_are_forgotten_are_made_again(rig: Rig) -> None:
    rig(TABLE, THREE, THREE)
    assert rig(TABLE, THREE, THREE)[0] == [3]
    launch.forget()
    assert not rig.plans
    for _ in range(2):
        assert rig(TABLE, THREE, THREE)[0] == [3]
        assert len(rig.plans) == 1


def test_the_suite_sees_whose_code_ran(rig: Rig) -> None:
    rig(TABLE, THREE, THREE)
    own, taker = code_of(rig.launcher), taker_of(rig.launcher)
    for taken, want in ((taker, {"own"}), (None, set())):
        with watch({}, own, taken) as seen:
            rig(TABLE, THREE, THREE)
        assert seen == want


def test_threads_read_their_own_calls(rig: Rig) -> None:
    tables = [torch.zeros(8, 64 + i, dtype=torch.int32) for i in range(4)]
    for t in tables:
        rig(t, THREE, THREE)
    rig.driver.started.clear()

    def many(t: Tensor) -> None:
        for _ in range(50):
            hal.get_last_loc(t, THREE, THREE, backend="planned")

    threads = [threading.Thread(target=many, args=(t,)) for t in tables]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    pairs = {tuple(int.from_bytes(v, "little") for v in (x[0], x[4])) for _, _, x in rig.driver.started}
    assert pairs == {(t.data_ptr(), t.stride(0)) for t in tables}
    assert len(rig.driver.started) == 200


@pytest.mark.parametrize("op", ["rope_kv_write", "decode_attention", "extend_attention", "get_last_loc"])
def test_plans_have_the_op_s_arguments_in_order(op: str) -> None:
    """What is handed on is by position."""
    module = __import__(f"hal.backends.cuda.{op}", fromlist=["_plans"])
    assert list(module._plans.names) == list(hal.ops.get_spec(op).args)
    assert _native.signer(hal.ops.get_spec(op).args, hal.ops.get_spec(op).static) is not _native._unsigned
