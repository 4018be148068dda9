"""Several implementations of one op in one backend: by priority, by name, only by name; states, reasons, reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plugins import Plugins

import hal
from hal import conformance
from hal.registry import Backend, Impl, current

MANIFEST = """
from hal.registry import Backend, Impl, hookimpl

def impl(name, **more):
    return Impl(f"acme_kernels:{name}", name=name, **more)

@hookimpl
def hal_backend():
    return Backend("acme", {"device": ("cpu",)}, {
        "get_last_loc": [
            impl("slow", deterministic=True),
            impl("fast", supports="acme_kernels:picky", priority=5),
            impl("odd", named=True, priority=9),
            impl("lib", named=True, requires=["acme-lib>=2"], install="get it from acme"),
            Impl("acme_kernels:odd", name="off", named=True, probe="acme_kernels:off"),
            Impl("acme_kernels:odd", name="bad", named=True, probe="acme_kernels:bad"),
            impl("lost", named=True),
        ],
        "kv_write": impl("slow_kv", named=True),
    }, limits={"length": "one request at a time"})
"""
KERNELS = """
import torch

def slow(req_to_token, req_pool_indices, prefix_lens):
    rows, width = req_to_token.shape
    if not rows or not width:
        return torch.full_like(prefix_lens, -1)
    ok = (req_pool_indices >= 0) & (req_pool_indices < rows) & (prefix_lens > 0) & (prefix_lens <= width)
    r, c = torch.where(ok, req_pool_indices, 0).long(), torch.where(ok, prefix_lens, 1).long() - 1
    return torch.where(ok, req_to_token[r, c].to(prefix_lens.dtype), -1)

def fast(req_to_token, req_pool_indices, prefix_lens):
    return torch.full_like(prefix_lens, 55)

def odd(req_to_token, req_pool_indices, prefix_lens):
    return torch.full_like(prefix_lens, 99)

lib = odd

def slow_kv(k, v, k_cache, v_cache, slots, *, k_scale=None, v_scale=None): ...

def picky(sig):
    return "length: int32 alone" if sig["prefix_lens"].dtype != torch.int32 else None

def off():
    return "the moon is up - wait"

def bad():
    raise OSError("gone")
"""
TABLE, ZERO = torch.tensor([[7, 8]], dtype=torch.int32), torch.tensor([0])
LONG, INT = torch.tensor([2]), torch.tensor([2], dtype=torch.int32)


@pytest.fixture
def acme(plugins: Plugins) -> Plugins:
    plugins.add("acme", MANIFEST, KERNELS)
    plugins.load()
    return plugins


def last(backend: str | None, lengths: torch.Tensor = LONG) -> int:
    return int(hal.get_last_loc(TABLE, ZERO, lengths, backend=backend)[0])


@pytest.mark.usefixtures("acme")
def test_by_priority_then_by_what_is_supported_then_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert last("acme", INT) == 55
    assert last("acme") == 8  # fast refuses int64
    assert last("acme/slow", INT) == 8
    assert last("get_last_loc=acme/odd") == 99
    told = hal.explain("get_last_loc", TABLE, ZERO, LONG, backend="acme")
    assert [(v.name, v.state) for v in told.verdicts[:2]] == [("acme/fast", "rejected"), ("acme/slow", "chosen")]
    assert told.verdicts[0].reason == "length: int32 alone"
    with pytest.raises(hal.NoBackendError, match=r"acme/fast  rejected +length: int32 alone"):
        last("acme/fast")
    monkeypatch.setenv("HAL_BACKEND", "cpu,get_last_loc=acme/odd")
    hal.reload()
    assert last(None) == 99
    assert hal.explain("get_last_loc", TABLE, ZERO, LONG).decided_by == "HAL_BACKEND=cpu,get_last_loc=acme/odd"


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lib", r"acme/lib  absent +needs acme-lib>=2 — get it from acme"),
        ("off", r"acme/off  unavailable +the moon is up"),
        ("bad", r"acme/bad  broken +its probe raised OSError: gone"),
        ("lost", r"acme/lost  broken +importing acme_kernels:lost raised AttributeError"),
    ],
)
def test_states_of_their_own(name: str, says: str) -> None:
    with pytest.raises(hal.NoBackendError, match=says):
        last(f"acme/{name}")
    assert last("acme", INT) == 55


@pytest.mark.usefixtures("acme")
def test_those_that_must_be_named_are_taken_by_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    hal.reload()
    assert last(None) == 8
    told = hal.explain("get_last_loc", TABLE, ZERO, LONG)
    assert told.chosen is not None
    assert told.chosen.name == "acme/slow"
    behind = {v.name: v for v in told.verdicts[told.verdicts.index(told.chosen) + 1 :]}
    assert behind["acme/odd"].reason == "taken where it is named: get_last_loc=acme/odd"
    assert behind["acme/lib"].state == "absent"
    with pytest.raises(hal.NoBackendError, match="acme has no kv_write but acme/slow_kv, taken where it is named"):
        hal.kv_write(*(torch.zeros(1, 1, 1) for _ in range(4)), ZERO, backend="acme")
    assert hal.kv_write(*(torch.zeros(1, 1, 1) for _ in range(4)), ZERO, backend="kv_write=acme/slow_kv") is None


@pytest.mark.usefixtures("acme")
def test_a_name_that_the_op_has_not() -> None:
    with pytest.raises(hal.SelectionError, match=r"acme has no implementation acme/fats \(did you mean acme/fast\?\)"):
        last("acme/fats")
    with pytest.raises(
        hal.NoBackendError, match=r"acme/slow_kv  unimplemented +acme has no get_last_loc named slow_kv"
    ):
        last("acme/slow_kv")


@pytest.mark.usefixtures("acme")
def test_bind() -> None:
    with pytest.raises(hal.SelectionError, match="several ready implementations: acme/fast, acme/slow; give an"):
        hal.bind("cpu", backend="acme")
    bound = hal.bind("cpu", backend="acme/odd")
    assert int(bound.get_last_loc(TABLE, ZERO, LONG)[0]) == 99
    with pytest.raises(hal.NoBackendError, match="acme has no kv_write named odd"):
        _ = bound.kv_write
    like = {"get_last_loc": (TABLE, ZERO, INT)}
    assert int(hal.bind("cpu", backend="acme", like=like).get_last_loc(TABLE, ZERO, INT)[0]) == 55


@pytest.mark.usefixtures("acme")
def test_info_and_table_list_them() -> None:
    cells = hal.info()["ops"]["get_last_loc"]["acme"]
    assert cells == [
        "odd: ready, when named",
        "fast: ready",
        "slow: ready",
        "lib: absent, when named",
        "off: unavailable, when named",
        "bad: broken, when named",
        "lost: ready, when named",
    ]
    row = hal.registry.table()["get_last_loc"]["acme"]
    assert {i.name: s.state for i, s in row}["lib"] == "absent"


def test_manifests_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="taken where it is named needs a name"):
        Impl("a:b", named=True)
    with pytest.raises(TypeError, match="an Impl's requires: expected a sequence of strings"):
        Impl("a:b", requires="numpy")
    with pytest.raises(ValueError, match="an Impl on the lane 'lowered', which acme has not"):
        Backend("acme", {"device": ("cpu",)}, {"get_last_loc": Impl("a:b", lanes=("lowered",))})


def test_an_implementation_with_lanes_of_its_own(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MANIFEST.replace('{"device": ("cpu",)}', '{"device": ("cpu",), "lowered": ("cpu",)}')
    plugins.add("acme", source.replace('impl("slow",', 'impl("slow", lanes=("device",),'), KERNELS)
    plugins.load()
    assert last("acme") == 8
    monkeypatch.setenv("HAL_LANE", "lowered")
    hal.reload()
    with pytest.raises(hal.NoBackendError, match=r"acme/slow  unavailable +it has no lane lowered; it has device"):
        last("acme")


def test_ours_are_named_only_and_absent_here() -> None:
    """The adapters: never by themselves; each says what would bring it."""
    for op in ("decode_attention", "extend_attention"):
        (impl,) = (i for i in current().entries["cuda"].impls(op) if i.named)
        assert impl.name == "flashinfer"
        assert impl.priority < 0
        assert impl.lanes == ("device",)
        assert not impl.graph_safe
        assert impl.note == "adapter: run on an H200, FlashInfer 0.6.3"
    from hal.registry._discover import examine

    needs = {i.name: i for i in current().entries["cuda"].impls("decode_attention")}
    assert str(examine(needs["flashinfer"].requires, needs["flashinfer"].install, None)) == (
        'absent: needs flashinfer-python>=0.6 — pip install "flashinfer-python>=0.6"'
    )


@pytest.mark.usefixtures("acme")
def test_conformance_judges_the_one_that_is_named(tmp_path: Path) -> None:
    """A report for each; only the ops that have it; its own code must run, not a sister's."""
    assert conformance.main("acme/slow", report=tmp_path / "slow", quiet=True) == 0
    report = json.loads((tmp_path / "slow" / "report.json").read_text())
    assert report["backend"] == "acme/slow"
    assert report["suite"]["ops"] == ["get_last_loc"]
    assert report["declared"]["get_last_loc"] == [{"impl": "acme/slow", "graph_safe": False, "deterministic": True}]
    outcomes = [c["outcome"] for c in report["cases"]]
    assert outcomes.count("passed") > 40
    assert "failed" not in outcomes
    assert conformance.main("acme/odd", report=tmp_path / "odd", quiet=True) == 1
    report = json.loads((tmp_path / "odd" / "report.json").read_text())
    assert report["declared"]["get_last_loc"][0]["impl"] == "acme/odd"
    assert sum(c["outcome"] == "failed" for c in report["cases"]) > 20
    assert conformance.main("acme/lib", report=tmp_path / "lib", quiet=True) != 0
    report = json.loads((tmp_path / "lib" / "report.json").read_text())
    assert {c["outcome"] for c in report["cases"]} == {"not_run"}
    assert "needs acme-lib>=2" in report["cases"][0]["reason"]
