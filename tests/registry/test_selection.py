"""Which backend runs a call: levels, strictness, auto and downgrades, lanes, bind; threads, tasks, processes."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

import hal
from hal._env import nearest
from hal._notation import example_signature
from hal.ops import get_spec
from hal.ops.spec import Signature, TensorSig
from hal.registry import _select, current
from hal.registry._config import parse
from hal.registry._table import live

TABLE = torch.tensor([[7, 8]], dtype=torch.int32)
ZERO, TWO = torch.tensor([0]), torch.tensor([2])
ROOT = Path(hal.__file__).parents[1]


def last(backend: str | None = None, width: torch.dtype = torch.int64) -> int:
    return int(hal.get_last_loc(TABLE, ZERO, TWO.to(width), backend=backend)[0])


def constant(value: int) -> Any:
    def fn(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        return torch.full_like(prefix_lens, value)

    return fn


@pytest.fixture
def five(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends b1 ... b5, whose get_last_loc is their number; no other plugin."""
    monkeypatch.setenv("HAL_PLUGINS", "none")
    for i in range(1, 6):
        hal.register("get_last_loc", backend=f"b{i}")(constant(i))


# --- levels -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("five")
def test_order_of_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert last() == 1  # auto: by name among equals
    monkeypatch.setenv("HAL_BACKEND", "b5")
    assert last() == 1  # read at the first selection, and then by reload alone
    hal.reload()
    assert last() == 5
    hal.configure(backend="b4")
    assert last() == 4
    with hal.use("b3"):
        assert last() == 3
        with hal.use("b2"):
            assert last() == 2
            assert last("b1") == 1
            assert last("auto") == 1
        assert last() == 3
    assert last() == 4
    hal.configure(backend="")
    assert last() == 5


@pytest.mark.usefixtures("five")
def test_first_level_with_an_entry_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_BACKEND", " b5 , kv_transfer=reference,")
    hal.reload()
    with hal.use("kv_transfer=b2"):
        assert last() == 5  # the block says nothing of this op
        with hal.use("get_last_loc=b1"), hal.use("b2,get_last_loc=auto"):
            assert last() == 1
        assert last("kv_transfer=reference") == 5
        assert last("get_last_loc=b4,b3") == 4


@pytest.mark.usefixtures("five")
def test_auto_overrides_what_is_outside() -> None:
    hal.configure(backend="b4")
    with hal.use("auto"):
        assert last() == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b1,b2", "two backends for all ops, b1 and b2"),
        ("get_last_loc=b1,get_last_loc=b2", "get_last_loc is given twice"),
        ("get_last_loc=", "expected BACKEND or OP=BACKEND"),
        ("=b1", "expected BACKEND or OP=BACKEND"),
        ("b1;b2", "expected BACKEND or OP=BACKEND"),
        ("b1/x/y", "expected BACKEND or OP=BACKEND"),
        ("get_last_lok=b1", "unknown op get_last_lok (did you mean get_last_loc?)"),
        ("referense", "unknown backend referense (did you mean reference?)"),
        ("zzzzzzzz", "unknown backend zzzzzzzz; known: auto, reference, b1"),
        ("reference/x", "reference has no implementation reference/x; known: none"),
    ],
)
@pytest.mark.usefixtures("five")
def test_malformed(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for way, shown in (
        (lambda: last(text), f"backend={text!r}"),
        (lambda: hal.use(text).__enter__(), f"hal.use({text!r})"),
        (lambda: hal.configure(backend=text), f"hal.configure(backend={text!r})"),
        (lambda: hal.bind("cpu", backend=text), f"backend={text!r}"),
    ):
        with pytest.raises(hal.SelectionError) as e:
            way()
        assert said in str(e.value)
        assert shown in str(e.value)
    assert last() == 1
    monkeypatch.setenv("HAL_BACKEND", text)
    with pytest.raises(hal.SelectionError) as e:
        hal.reload()
    assert said in str(e.value)
    assert f"HAL_BACKEND={text}" in str(e.value)
    assert last() == 1  # the table before stays


@pytest.mark.usefixtures("five")
def test_backend_that_is_no_name() -> None:
    with pytest.raises(hal.ArgumentError, match="backend: expected a backend's name") as e:
        hal.get_last_loc(TABLE, ZERO, TWO, backend=3)  # type: ignore[arg-type]
    assert e.value.argument == "backend"


@pytest.mark.parametrize(
    ("word", "near"),
    [("cdua", "cuda"), ("pcu", "cpu"), ("CUDA", "cuda"), ("ascent", "ascend"), ("gpu", "cpu"), ("tpuv4", "")],
)
def test_did_you_mean(word: str, near: str) -> None:
    assert (nearest(word, ("ascend", "cpu", "cuda")) or "") == near


def test_empty_text_chooses_nothing() -> None:
    assert parse(" , ", str).get("x") is None


# --- variables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HAL_BACKNED", "cpu", "unknown environment variable HAL_BACKNED; did you mean HAL_BACKEND?"),
        ("HAL_backend", "cpu", "did you mean HAL_BACKEND?"),
        ("HAL_FALLBACK", "eror", "expected one of warn, error (did you mean error?)"),
        ("HAL_CHECKS", "none", "expected one of args, full, off"),
        ("HAL_LANE", "devise", "(did you mean device?)"),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_typo_in_the_environment(name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(hal.SelectionError) as e:
        last("reference")
    assert said in str(e.value)


@pytest.mark.usefixtures("fresh")
def test_variables_in_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_OF_FAME", "1")
    monkeypatch.setenv("HAL_CHECKS", "full")
    monkeypatch.delenv("HAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    hal.configure(backend="reference")
    info = hal.info()
    assert info["foreign_variables"] == ["HAL_OF_FAME"]
    rows = {v["name"]: (v["value"], v["source"]) for v in info["environment"]}
    assert rows["HAL_CHECKS"] == ("full", "environment")
    assert rows["HAL_BACKEND"] == ("reference", "hal.configure")
    assert rows["HAL_PLUGINS"] == ("all", "default")
    assert rows["HAL_LANE"] == ("device", "default")
    assert rows["HAL_CACHE_DIR"] == ("/somewhere/hal-kernels", "default")
    json.dumps(info)


# --- strict and auto --------------------------------------------------------------------------------


@pytest.mark.usefixtures("five")
def test_named_is_strict() -> None:
    hal.register("get_last_loc", backend="fussy", supports=lambda sig: "always: no")(constant(9))
    hal.register("get_last_loc", backend="far", devices=("npu",))(constant(9))
    for name, why in (("fussy", "always: no"), ("far", "the tensors are on cpu; lane device takes npu")):
        for _ in range(2):
            with pytest.raises(hal.NoBackendError) as e:
                last(name)
            text = str(e.value)
            assert text.startswith("hal: no backend for get_last_loc(req_to_token=i32[1,2]@cpu, ")
            assert why in text
            assert f"chosen by backend='{name}' (strict). Try get_last_loc=reference" in text
            assert "b1" in text
            assert "not asked for" in text


@pytest.mark.usefixtures("five")
def test_advice_keeps_the_rest_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    hal.register("get_last_loc", backend="fussy", supports=lambda sig: "always: no")(constant(9))
    monkeypatch.setenv("HAL_BACKEND", "b1, kv_transfer=b2, get_last_loc=fussy")
    hal.reload()
    with pytest.raises(hal.NoBackendError, match="Try HAL_BACKEND=b1,kv_transfer=b2,get_last_loc=reference"):
        last()
    monkeypatch.setenv("HAL_BACKEND", "get_last_loc=fussy")
    hal.reload()
    with pytest.raises(hal.NoBackendError, match=r"Try HAL_BACKEND=get_last_loc=reference"):
        last()


def test_a_named_call_wakes_no_other_backend(plugins: Plugins) -> None:
    plugins.add(
        "acme", manifest("acme", probe='"acme_kernels:probe"'), "def probe(): raise SystemError('woken')"
    )
    plugins.load()
    assert last("reference") == 8
    hal.register("get_last_loc", backend="mine")(constant(3))
    assert last("mine") == 3
    assert not current().entries["acme"]._states
    hal.explain("get_last_loc", TABLE, ZERO, TWO, backend="mine")
    assert current().entries["acme"]._states


@pytest.mark.usefixtures("five")
def test_auto_goes_by_priority_then_name() -> None:
    hal.register("get_last_loc", backend="zz", priority=1)(constant(6))
    assert last() == 6
    told = hal.explain("get_last_loc", TABLE, ZERO, TWO)
    assert [v.name for v in told.verdicts] == ["zz", "b1", "b2", "b3", "b4", "b5", "reference"]
    assert [v.state for v in told.verdicts[:2]] == ["chosen", "ready"]
    assert str(told).splitlines()[0].endswith("runs on zz")
    assert not told.strict


def test_no_third_party_goes_before_a_built_in(plugins: Plugins) -> None:
    plugins.add(
        "acme", manifest("acme", ops='{"get_last_loc": Impl("acme_kernels:get_last_loc", priority=99)}')
    )
    plugins.load()
    order = [c.title for c in _select.candidates(current(), "get_last_loc", "auto", "cpu")]
    assert order == ["cpu", "acme"]


def refuse(sig: Signature) -> str | None:
    return "narrow: i64 alone" if sig["prefix_lens"].dtype == torch.int32 else None


@pytest.mark.usefixtures("fresh")
def test_downgrade_warns_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "none")
    hal.register("get_last_loc", backend="a", supports=refuse)(constant(1))
    hal.register("get_last_loc", backend="b")(constant(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last() == 1
    with pytest.warns(
        hal.FallbackWarning, match="get_last_loc runs on b: a rejected: narrow: i64 alone"
    ) as caught:
        assert last(width=torch.int32) == 2
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last(width=torch.int32) == 2
        hal.configure(checks="full")  # other settings, the same plugins: said already
        assert last(width=torch.int32) == 2
    hal.configure(fallback="error")
    assert last() == 1
    with pytest.raises(hal.NoBackendError, match="HAL_FALLBACK=error forbids going on with b"):
        last(width=torch.int32)
    assert last("b", width=torch.int32) == 2
    hal.configure(fallback="")
    assert last(width=torch.int32) == 2


@pytest.mark.usefixtures("fresh")
def test_ending_at_the_reference_is_a_downgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "none")
    with pytest.warns(hal.FallbackWarning, match="no backend for this device"):
        assert last() == 8
    monkeypatch.setenv("HAL_FALLBACK", "error")
    hal.reload()
    with pytest.raises(hal.NoBackendError, match="forbids going on with reference"):
        last()
    assert last("reference") == 8
    with pytest.raises(hal.NoBackendError, match="forbids"):
        hal.bind("cpu")


def test_absent_is_no_downgrade_but_the_last_resort_names_it(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    plugins.add("acme", manifest("acme", requires='("acme_rt",)'))
    plugins.load()
    with pytest.warns(hal.FallbackWarning, match="acme absent: needs acme_rt — pip install"):
        assert last() == 8
    plugins.add("zeta", manifest("zeta"))
    monkeypatch.setenv("HAL_PLUGINS", "acme,zeta")
    plugins.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last() == 7
        assert (
            int(
                hal.bind("cpu", like={"get_last_loc": (TABLE, ZERO, TWO)}, backend="zeta").get_last_loc(
                    TABLE, ZERO, TWO
                )[0]
            )
            == 7
        )


def test_broken_is_a_downgrade_if_it_would_have_come_first(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme,mmm,zeta")
    plugins.add("acme", manifest("acme"), "raise OSError('lost')")
    plugins.add("mmm", manifest("mmm"))
    plugins.add(
        "zeta", manifest("zeta", probe='"zeta_kernels:probe"'), "def probe(): raise OSError('behind')"
    )
    plugins.load()
    with pytest.warns(hal.FallbackWarning) as caught:
        assert last() == 7
    (one,) = caught
    assert (
        "get_last_loc runs on mmm: acme broken: importing acme_kernels:get_last_loc raised OSError: lost"
        in str(one.message)
    )
    plugins.load()
    with pytest.warns(hal.FallbackWarning, match="acme broken"):
        assert int(hal.bind("cpu").get_last_loc(TABLE, ZERO, TWO)[0]) == 7


def test_plugin_without_a_manifest_is_named_at_the_last_resort(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    plugins.add("acme", "raise OSError('lost')")
    plugins.load()
    with pytest.warns(
        hal.FallbackWarning,
        match="get_last_loc runs on reference: acme broken: importing acme raised OSError",
    ):
        assert last() == 8


# --- explain ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("five")
def test_explain() -> None:
    told = hal.explain("get_last_loc", TABLE, ZERO, prefix_lens=TWO, backend="b2")
    assert told.chosen is not None
    assert (told.op, told.chosen.name, told.strict, told.decided_by) == (
        "get_last_loc",
        "b2",
        True,
        "backend='b2'",
    )
    assert (
        "hal: get_last_loc(req_to_token=i32[1,2]@cpu, req_pool_indices=i64[1]@cpu, prefix_lens=i64[1]@cpu) runs on b2"
        in str(told)
    )
    same = hal.explain(
        "get_last_loc",
        get_spec("get_last_loc").sign({"req_to_token": TABLE, "req_pool_indices": ZERO, "prefix_lens": TWO}),
    )
    assert same.chosen is not None
    assert same.chosen.name == "b1"
    assert hal.explain("get_last_loc", TABLE, ZERO, TWO, backend="reference").verdicts[0].name == "reference"
    with pytest.raises(hal.SelectionError, match="did you mean get_last_loc"):
        hal.explain("get_last_lok", TABLE)
    with pytest.raises(hal.ArgumentError):
        hal.explain("get_last_loc", TABLE, ZERO, None)
    with pytest.raises(TypeError, match=r"get_last_loc\(\) missing"):
        hal.explain("get_last_loc", TABLE)


@pytest.mark.usefixtures("five")
def test_explain_leaves_out_ready_backends_of_other_devices() -> None:
    hal.register("get_last_loc", backend="far", devices=("npu",))(constant(9))
    told = hal.explain("get_last_loc", TABLE, ZERO, TWO, backend="b1")
    assert [v.name for v in told.verdicts] == ["b1", "b2", "b3", "b4", "b5"]


@pytest.mark.usefixtures("fresh")
def test_example_signature() -> None:
    rope = get_spec("rope_kv_write")
    q = TensorSig(torch.float16, "npu", (64, 32, 192), "contiguous", True, 3, (64, 32, 192))
    sig = example_signature(rope, {"q": q, "interleaved": True})
    assert (sig.device, sig.index, sig.dims["head_dim"], sig.dims["q_heads"]) == ("npu", 3, 192, 32)
    assert sig["k"].dtype == torch.float16
    assert (sig["k"].device, sig["k"].example[0], sig["k"].example[2]) == ("npu", 64, 192)
    assert sig["q"].shape == (None, 32, 192)
    assert sig["cos_sin_cache"].dtype == torch.float32
    assert sig["interleaved"] is True


# --- bind -------------------------------------------------------------------------------------------


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
    with pytest.raises(
        hal.SelectionError, match=r"several ready implementations: b1, b2, b3, b4, b5; give an example"
    ):
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
    with pytest.raises(
        hal.SelectionError, match="kv_write has several ready implementations: b1, b2; give an"
    ):
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


# --- configure, checks, lanes -----------------------------------------------------------------------


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
    plugins.add(
        "acme", manifest("acme", lanes='{"device": ("npu",), "lowered": ("cpu",)}', probe='"acme_kernels:no"')
    )
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
            pytest.raises(
                hal.BackendError, match="get_last_loc: a call of a new kind while a graph is captured"
            ),
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

    assert [
        (["kv_transfer"], "cpu", {"page": 3}),
        (list(current().op_names), "cpu", {}),
    ] == acme_kernels.CALLS
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


# --- bounded, and safe among threads, tasks and processes ---------------------------------------------


@pytest.mark.usefixtures("five")
def test_caches_do_not_grow_with_calls() -> None:
    def calls() -> None:
        for n in range(1, 40):
            with hal.use("b2"):
                hal.get_last_loc(TABLE, ZERO.expand(n).contiguous(), TWO.expand(n).contiguous())
            with hal.use("b3"), hal.use("b1"):
                last()
            last("b4")

    calls()
    size = sum(map(len, current().caches.values()))
    calls()
    assert size == sum(map(len, current().caches.values())) == 3


@pytest.mark.usefixtures("five")
def test_use_does_not_reach_new_threads() -> None:
    seen: list[int] = []
    with hal.use("b3"):
        thread = threading.Thread(target=lambda: seen.append(last()))
        thread.start()
        thread.join()
        assert last() == 3
    assert seen == [1]


@pytest.mark.usefixtures("five")
def test_tasks_have_their_own() -> None:
    async def one(i: int) -> list[int]:
        got = []
        with hal.use(f"b{i}"):
            for _ in range(20):
                await asyncio.sleep(0)
                got.append(last())
        return got

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(i) for i in range(1, 6)))

    assert asyncio.run(all_of_them()) == [[i] * 20 for i in range(1, 6)]


@pytest.mark.usefixtures("five")
def test_threads_call_while_tables_are_swapped() -> None:
    errors: list[BaseException] = []
    stop = threading.Event()
    calls = [0] * 4

    def call(i: int) -> None:
        try:
            with hal.use(f"b{i + 1}"):
                while not stop.is_set():
                    assert last() == i + 1
                    assert last("b5") == 5
                    calls[i] += 1
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for i in range(40):
        hal.configure(checks=("args", "full", "off")[i % 3])
        hal.register("kv_transfer", backend=f"extra{i % 2}")(get_spec("kv_transfer").reference)
        hal.reload()
        if i % 2:
            hal.unregister("extra0")
    stop.set()
    for t in threads:
        t.join()
    assert not errors
    assert all(calls)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.usefixtures("five")
def test_forked_worker_while_the_writer_lock_is_held() -> None:
    last("b2")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with live.lock:
            inside.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
        pid = os.fork()
    if not pid:
        try:
            hal.configure(backend="b3")
            os._exit(last())
        finally:
            os._exit(99)
    leave.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert last("b2") == 2


def test_spawned_worker_reads_the_environment_anew(tmp_path: Path) -> None:
    code = (
        "import multiprocessing as m, sys\n"
        "def work(q):\n"
        "    import hal\n"
        "    from hal.registry import current\n"
        "    q.put(current().choices[0].source)\n"
        "if __name__ == '__main__':\n"
        "    c = m.get_context('spawn'); q = c.Queue(); p = c.Process(target=work, args=(q,)); p.start()\n"
        "    print(q.get(timeout=60)); p.join(); sys.exit(p.exitcode)\n"
    )
    (tmp_path / "work.py").write_text(code)
    env = {**os.environ, "HAL_BACKEND": "reference", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "work.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "HAL_BACKEND=reference"
