"""Which backend runs a call: levels, strictness, auto and downgrades; and `explain`, which says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from plugins import TABLE, TWO, ZERO, Plugins, constant, last, manifest

import hal
from hal._env import nearest
from hal._notation import example_signature
from hal.ops import get_spec
from hal.ops.spec import Signature, TensorSig
from hal.registry import _select, current
from hal.registry._config import parse

# --- levels ------------------------------------------------------------------------------------------


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


# --- strict and auto ---------------------------------------------------------------------------------


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
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), "def probe(): raise SystemError('woken')")
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
    plugins.add("acme", manifest("acme", ops='{"get_last_loc": Impl("acme_kernels:get_last_loc", priority=99)}'))
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
    with pytest.warns(hal.FallbackWarning, match="get_last_loc runs on b: a rejected: narrow: i64 alone") as caught:
        assert last(width=torch.int32) == 2
    assert len(caught) == 1
    assert caught[0].filename == last.__code__.co_filename
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


def test_absent_is_no_downgrade_but_the_last_resort_names_it(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_broken_is_a_downgrade_if_it_would_have_come_first(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme,mmm,zeta")
    plugins.add("acme", manifest("acme"), "raise OSError('lost')")
    plugins.add("mmm", manifest("mmm"))
    plugins.add("zeta", manifest("zeta", probe='"zeta_kernels:probe"'), "def probe(): raise OSError('behind')")
    plugins.load()
    with pytest.warns(hal.FallbackWarning) as caught:
        assert last() == 7
    (one,) = caught
    assert "get_last_loc runs on mmm: acme broken: importing acme_kernels:get_last_loc raised OSError: lost" in str(
        one.message
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
        hal.FallbackWarning, match="get_last_loc runs on reference: acme broken: importing acme raised OSError"
    ):
        assert last() == 8


# --- explain -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("five")
def test_explain() -> None:
    told = hal.explain("get_last_loc", TABLE, ZERO, prefix_lens=TWO, backend="b2")
    assert told.chosen is not None
    assert (told.op, told.chosen.name, told.strict, told.decided_by) == ("get_last_loc", "b2", True, "backend='b2'")
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
