"""`bind`, `configure`, `warmup`; checks, lanes and captures."""

from __future__ import annotations

import inspect
import os
import sys

import pytest
import torch
from plugins import TABLE, TWO, ZERO, Plugins, constant, last, manifest

import hal
from hal.ops import get_spec
from hal.ops.spec import Signature
from hal.registry import _select, current

# --- bind --------------------------------------------------------------------------------------------


def refuse(sig: Signature) -> str | None:
    return "narrow: i64 alone" if sig["prefix_lens"].dtype == torch.int32 else None


@pytest.mark.usefixtures("fresh")
def test_bind_gives_the_functions_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "none")
    mine = constant(5)
    hal.register("get_last_loc", backend="mine")(mine)
    ops = hal.bind("cpu", backend="mine")
    assert ops.get_last_loc is mine
    assert list(ops) == ["get_last_loc"]
    assert repr(ops) == "hal.Bound(get_last_loc)"
    with pytest.raises(hal.NoBackendError, match="mine has no kv_transfer"):
        _ = ops.kv_transfer
    with pytest.raises(AttributeError, match=r"did you mean kv_transfer\?"):
        _ = ops.kv_tranfer
    with pytest.raises(AttributeError, match="frozen"):
        ops.get_last_loc = 3
    assert hal.bind("cpu", backend="reference").kv_transfer is get_spec("kv_transfer").reference
    assert hal.bind(torch.device("cpu"), backend="kv_transfer=reference,mine").get_last_loc is mine
    with hal.use("mine"):
        assert list(hal.bind("cpu")) == ["get_last_loc"]


@pytest.mark.usefixtures("five")
def test_bind_rules() -> None:
    with pytest.raises(hal.SelectionError, match=r"several ready implementations: b1, b2, b3, b4, b5; give an example"):
        hal.bind("cpu")
    like = {"get_last_loc": {"req_to_token": TABLE, "req_pool_indices": ZERO, "prefix_lens": TWO}}
    with pytest.warns(hal.FallbackWarning):
        assert int(hal.bind("cpu", like=like).get_last_loc(TABLE, ZERO, TWO)[0]) == 1
    # Of no concern to who has an example of what is called.
    for name in ("b1", "b2"):
        hal.register("kv_write", backend=name)(get_spec("kv_write").reference)
    with pytest.warns(hal.FallbackWarning):
        bound = hal.bind("cpu", like=like)
    assert int(bound.get_last_loc(TABLE, ZERO, TWO)[0]) == 1
    with pytest.raises(hal.SelectionError, match="kv_write has several ready implementations: b1, b2; give an"):
        _ = bound.kv_write
    with pytest.raises(hal.SelectionError, match="unknown op nothing"):
        hal.bind("cpu", like={"nothing": ()})
    with pytest.raises(hal.SelectionError, match=r"checks='arg'.*did you mean args"):
        hal.bind("cpu", checks="arg")
    with pytest.raises(hal.SelectionError, match="the example of get_last_loc is on cpu"):
        hal.bind("meta", backend="b1", like=like)
    with pytest.raises(hal.ArgumentError):
        hal.bind("cpu", backend="b1", like={"get_last_loc": (TABLE, ZERO, TWO.float())})
    hal.register("get_last_loc", backend="fussy", supports=refuse)(constant(9))
    with pytest.raises(hal.NoBackendError, match="narrow"):
        hal.bind("cpu", backend="fussy", like={"get_last_loc": (TABLE, ZERO, TWO.int())})
    lacking = hal.bind("meta", backend="b1")
    with pytest.raises(hal.NoBackendError, match="bound for meta; lane device takes cpu"):
        _ = lacking.get_last_loc


@pytest.mark.usefixtures("five")
def test_bind_with_checks() -> None:
    fn = hal.bind("cpu", backend="b1", checks="args").get_last_loc
    assert inspect.signature(fn) == get_spec("get_last_loc").signature
    assert fn.__name__ == "get_last_loc"
    assert int(fn(TABLE, ZERO, prefix_lens=TWO)[0]) == 1
    with pytest.raises(hal.ArgumentError):
        fn(TABLE, ZERO, TWO.float())
    with pytest.raises(TypeError, match="get_last_loc"):
        fn(TABLE)


def test_bind_to_a_broken_backend(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme"), "raise OSError('lost')")
    plugins.load()
    with pytest.raises(hal.NoBackendError, match=r"acme +broken +importing"):
        _ = hal.bind("cpu", backend="acme").get_last_loc


# --- configure, checks, lanes ------------------------------------------------------------------------


@pytest.mark.usefixtures("five")
def test_configure_is_all_or_nothing() -> None:
    hal.configure(backend="b2", checks="full")
    for bad in ({"backend": "zzzzzzz"}, {"checks": "arsg"}, {"fallback": "never"}):
        with pytest.raises(hal.SelectionError):
            hal.configure(**{"backend": "b3", "checks": "off", "fallback": "error", **bad})
        assert last() == 2
        assert (current().checks_name, current().fallback) == ("full", "warn")
    hal.configure(checks="")
    assert current().checks_name == "args"


@pytest.mark.usefixtures("five")
def test_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CHECKS", "off")
    hal.reload()
    assert last("b1") == 1
    for _ in range(2):
        # Unchecked: what the function does with it is its own affair. No key can be made of it.
        assert hal.get_last_loc(TABLE, [], TWO, backend="b1").tolist() == [1]  # type: ignore[arg-type]
        assert hal.get_last_loc(TABLE, torch.zeros(5), TWO, backend="b1").tolist() == [1]
    hal.configure(checks="args")
    for _ in range(2):
        assert last("b1") == 1
        with pytest.raises(hal.ArgumentError):
            hal.get_last_loc(TABLE, torch.tensor([0, 0]), TWO, backend="b1")
    assert hal.get_last_loc(TABLE, torch.tensor([9]), TWO, backend="b1").tolist() == [1]
    hal.configure(checks="full")
    for _ in range(2):
        assert last("b1") == 1
        with pytest.raises(hal.ArgumentError, match=r"values in \[-1, 0\]; got 9 at index 0"):
            hal.get_last_loc(TABLE, torch.tensor([9]), TWO, backend="b1")


def test_lane(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", manifest("acme", lanes='{"device": ("npu",), "lowered": ("cpu",)}', probe='"acme_kernels:no"'))
    plugins.add("dev", manifest("dev"))
    monkeypatch.setenv("HAL_LANE", "lowered")
    plugins.load()
    assert last("acme") == 7
    told = hal.explain("get_last_loc", TABLE, ZERO, TWO, backend="acme")
    assert "runs on acme (lane lowered)" in str(told)
    assert hal.info()["lane"] == "lowered"
    assert hal.info()["ops"]["get_last_loc"]["acme"] == ["ready (lowered)"]
    with pytest.raises(hal.NoBackendError, match="lane lowered needs a named backend — set HAL_BACKEND"):
        last()
    with pytest.raises(hal.NoBackendError, match="lane lowered needs a named backend"):
        _ = hal.bind("cpu").get_last_loc
    with pytest.raises(hal.NoBackendError, match="it has no lane lowered; it has device"):
        last("dev")
    assert int(hal.bind("cpu", backend="acme").get_last_loc(TABLE, ZERO, TWO)[0]) == 7
    monkeypatch.setenv("HAL_LANE", "device")
    plugins.load()
    with pytest.raises(hal.NoBackendError, match="broken"):
        last("acme")


@pytest.mark.usefixtures("fresh")
def test_interpreter_lane_needs_to_come_before_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_LANE", "interpreter")
    # Set first: monkeypatch restores only what it knows of, and the lane sets the variable by itself.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", object())  # type: ignore[arg-type]
    with pytest.raises(hal.SelectionError, match="triton is imported already without it"):
        last("reference")
    monkeypatch.delitem(sys.modules, "triton")
    assert last("reference") == 8
    assert os.environ["TRITON_INTERPRET"] == "1"
    hal.reload()
    assert last("reference") == 8


@pytest.mark.usefixtures("fresh")
def test_selecting_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """meta stands in for the device, under tensors that have memory; its namespace, for torch.cuda."""

    class Far(torch.Tensor):
        device = torch.device("meta")  # type: ignore[assignment]
        is_cpu = False  # type: ignore[assignment]

    class Meta:
        capturing = False

        @classmethod
        def is_current_stream_capturing(cls) -> bool:
            return cls.capturing

    monkeypatch.setattr(torch, "meta", Meta, raising=False)
    monkeypatch.setenv("HAL_PLUGINS", "none")
    hal.register("get_last_loc", backend="far", devices=("meta",))(constant(1))
    args = [t.as_subclass(Far) for t in (TABLE, ZERO, TWO)]
    with hal.use("far"):
        hal.get_last_loc(*args)
        Meta.capturing = True
        hal.get_last_loc(*args)  # known
        with (
            hal.use("far"),
            pytest.raises(hal.BackendError, match="get_last_loc: a call of a new kind while a graph is captured"),
        ):
            hal.get_last_loc(*args)
        with pytest.raises(hal.BackendError, match="call the op once before the capture"):
            hal.get_last_loc(args[0], args[1].int(), args[2])
        assert last("reference") == 8  # a call on the CPU is in no capture
    Meta.capturing = False
    hal.configure(checks="full", backend="far")
    Meta.capturing = True
    with pytest.raises(hal.BackendError):
        hal.get_last_loc(*args)
    assert _select.capturing("meta")
    assert not _select.capturing("cpu")
    assert not _select.capturing("nothing_like_it")


@pytest.mark.usefixtures("fresh")
def test_warmup(plugins: Plugins) -> None:
    kernels = """
CALLS = []
def warm(ops, device, **options): CALLS.append((ops, str(device), options))
def fail(ops, device): raise OSError("no compiler")
def helpless(ops, device):
    from hal import HalError
    raise HalError("hal: say it")
def get_last_loc(req_to_token, req_pool_indices, prefix_lens): return prefix_lens
"""
    plugins.add("acme", manifest("acme", warmup='"acme_kernels:warm"'), kernels)
    plugins.add("bad", manifest("bad", warmup='"bad_kernels:fail"'), kernels)
    plugins.add("worse", manifest("worse", warmup='"worse_kernels:helpless"'), kernels)
    plugins.add("far", manifest("far", lanes='{"device": ("npu",)}'), kernels)
    plugins.add("calm", manifest("calm"), kernels)
    plugins.load()
    assert set(hal.warmup("cpu", ops=["kv_transfer"], backend="acme", page=3)) == {"acme"}
    hal.warmup("cpu", backend="acme")
    import acme_kernels  # type: ignore[import-not-found]

    assert [(["kv_transfer"], "cpu", {"page": 3}), (list(current().op_names), "cpu", {})] == acme_kernels.CALLS
    assert hal.warmup("cpu", backend="calm") == {}
    with pytest.raises(hal.BackendError, match="bad raised OSError: no compiler"):
        hal.warmup("cpu", backend="bad")
    with pytest.raises(hal.HalError, match="say it"):
        hal.warmup("cpu", backend="worse")
    with pytest.raises(hal.NoBackendError, match="far is ready for cpu in lane device"):
        hal.warmup("cpu", backend="far")
    with pytest.raises(hal.SelectionError, match=r"unknown backend acm \(did you mean acme"):
        hal.warmup("cpu", backend="acm")
    with pytest.raises(hal.SelectionError, match="unknown op"):
        hal.warmup("cpu", ops=["x"])
    assert hal.warmup("meta") == {}
