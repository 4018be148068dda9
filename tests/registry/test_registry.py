"""Ops of plugins' own, observers, several implementations, registration, the table."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from plugins import TABLE, TWO, ZERO, Plugins, constant, entry, last, manifest

import hal
from hal.registry import Backend, Impl, current
from hal.registry._discover import Entry

# --- ops of a plugin's own ---------------------------------------------------------------------------


OWN_OP = """
import torch
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import OpSpec, Sample, TensorArg, ValueArg
from hal.registry import Backend, Impl, hookimpl

def {name}(x, table=2, *, run=True):
    '''`x` times `table`.'''
    return x * table

@hookimpl
def hal_ops():
    return [OpSpec(
        {name},
        args={{"x": TensorArg("n", (torch.float32,)), "table": ValueArg((2, 3)), "run": ValueArg((True, False))}},
        oracle=lambda a: {{"return": Want(a["x"] == a["x"], (Candidate(a["x"] * a["table"]),))}},
        make=lambda seed=0: {{"x": torch.ones(3), "table": 2, "run": True}}, samples=(Sample("one"),),
    )]

@hookimpl
def hal_backend():
    return Backend("{backend}", {{"device": ("cpu",)}}, {{"{name}": Impl("{backend}_kernels:{name}")}})
"""
OWN_KERNEL = "def {name}(x, table=2, *, run=True): return x * table + 100"


def add_op(plugins: Plugins, backend: str, name: str) -> None:
    plugins.add(backend, OWN_OP.format(name=name, backend=backend), OWN_KERNEL.format(name=name))


def test_op_of_a_plugin(plugins: Plugins) -> None:
    add_op(plugins, "acme", "scale")
    plugins.load()
    x = torch.ones(2)
    assert hal.ops.scale(x, 3, backend="reference").tolist() == [3, 3]
    assert hal.ops.scale(x, backend="acme").tolist() == [102, 102]
    assert hal.ops.scale(x, table=3, run=False).tolist() == [103, 103]
    with hal.use("scale=reference"):
        assert hal.ops.scale(x).tolist() == [2, 2]
    assert hal.ops.scale is hal.ops.scale
    assert hal.ops.scale.__doc__ == "`x` times `table`."
    with pytest.raises(hal.ArgumentError, match="scale: table"):
        hal.ops.scale(x, 4)
    assert hal.bind("cpu").scale(x).tolist() == [102, 102]
    assert "scale" in hal.info()["ops"]
    assert "scale" in hal.registry.table()
    gone = hal.ops.scale
    (plugins.root / "hal_acme-1.2.dist-info" / "entry_points.txt").write_text("")
    plugins.load()
    with pytest.raises(hal.SelectionError, match="unknown op scale"):
        gone(x)
    with pytest.raises(AttributeError, match="unknown op scale"):
        _ = hal.ops.scale


def test_no_op_of_that_name() -> None:
    with pytest.raises(AttributeError, match="_hidden"):
        _ = hal.ops._hidden
    with pytest.raises(AttributeError, match="did you mean kv_transfer"):
        _ = hal.ops.kv_tranfer


@pytest.mark.parametrize("first", ["from hal.ops.kv_move import SPEC", "import hal; hal.kv_move", "import hal.ops"])
def test_an_op_is_its_function_whatever_was_imported_first(first: str) -> None:
    check = (
        "import hal; from hal.ops import kv_move; from hal.ops.kv_move import SPEC; import hal.ops.kv_transfer; "
        "assert hal.ops.kv_move is kv_move is hal.kv_move; assert hal.ops.kv_transfer is hal.kv_transfer; "
        "assert SPEC is hal.ops.get_spec('kv_move')"
    )
    subprocess.run([sys.executable, "-c", f"{first}; {check}"], check=True)


@pytest.mark.parametrize("name", ["get_last_loc", "spec", "_quiet", "BUILTIN"])
def test_op_with_a_name_of_ours(plugins: Plugins, name: str) -> None:
    add_op(plugins, "acme", name)
    plugins.load()
    assert entry("acme").state().state == "broken"
    assert f"the name {name} is hal's own" in entry("acme").state().reason
    assert last("reference") == 8


def test_two_plugins_with_one_op(plugins: Plugins) -> None:
    add_op(plugins, "acme", "scale")
    add_op(plugins, "zeta", "scale")
    plugins.load()
    states = {n: entry(n).state() for n in ("acme", "zeta")}
    assert sorted(s.state for s in states.values()) == ["broken", "ready"]
    broken = next(n for n, s in states.items() if s.state == "broken")
    assert "another plugin's already" in states[broken].reason


# --- observers ---------------------------------------------------------------------------------------


OBSERVER = """
from hal.registry import hookimpl
TOLD = []

@hookimpl
def hal_on_bind(op, backend, lane): TOLD.append(("bind", op, backend, lane))

@hookimpl
def hal_on_reject(reason, backend): TOLD.append(("reject", backend, reason))

@hookimpl
def hal_on_fallback(op, backend, reason):
    {fallback}
"""


def refusing(plugins: Plugins, name: str = "acme") -> None:
    kernels = "def get_last_loc(req_to_token, req_pool_indices, prefix_lens): pass\n"
    kernels += "def supports(sig): return 'small: no'"
    ops = f'{{"get_last_loc": Impl("{name}_kernels:get_last_loc", supports="{name}_kernels:supports")}}'
    plugins.add(name, manifest(name, ops=ops), kernels)


def test_observers(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme,watch,angry")
    refusing(plugins)
    plugins.add("watch", OBSERVER.format(fallback="TOLD.append(('fallback', op, backend, reason))"))
    plugins.add("angry", OBSERVER.format(fallback="raise OSError('angry')"))
    plugins.load()
    assert set(current().entries) == {"acme"}
    with pytest.warns(RuntimeWarning, match="observer angry .*: hal_on_fallback raised OSError: angry") as caught:
        assert last() == 8
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last() == 8
        assert int(hal.get_last_loc(TABLE, ZERO.int(), TWO)[0]) == 8
    import angry  # type: ignore[import-not-found]
    import watch  # type: ignore[import-not-found]

    one = [
        ("reject", "acme", "small: no"),
        ("fallback", "get_last_loc", "acme", "small: no"),
        ("bind", "get_last_loc", "reference", "device"),
    ]
    assert [*one, *one] == watch.TOLD
    assert one[:1] == angry.TOLD


# --- several implementations, registration, the table ------------------------------------------------


SEVEN, EIGHT = constant(7), constant(8)


def test_several_implementations(plugins: Plugins) -> None:
    kernels = """
import torch
def low(req_to_token, req_pool_indices, prefix_lens): return torch.full_like(prefix_lens, 1)
def high(req_to_token, req_pool_indices, prefix_lens): return torch.full_like(prefix_lens, 2)
def supports(sig): return None if sig["prefix_lens"].dtype.itemsize == 8 else "narrow: i64 alone"
"""
    ops = """{"get_last_loc": [Impl("acme_kernels:low", name="low"),
                               Impl("acme_kernels:high", "acme_kernels:supports", name="high", priority=5)]}"""
    plugins.add("acme", manifest("acme", ops=ops), kernels)
    plugins.load()
    assert last("acme") == last("acme/high") == 2
    assert last("acme/low") == last("get_last_loc=acme/low") == 1
    assert int(hal.get_last_loc(TABLE, ZERO, TWO.int(), backend="acme")[0]) == 1
    with pytest.raises(hal.NoBackendError, match="narrow: i64 alone"):
        hal.get_last_loc(TABLE, ZERO, TWO.int(), backend="acme/high")
    told = hal.explain("get_last_loc", TABLE, ZERO, TWO.int(), backend="acme")
    assert [(v.name, v.state) for v in told.verdicts[:2]] == [("acme/high", "rejected"), ("acme/low", "chosen")]
    with pytest.raises(hal.SelectionError, match=r"no implementation acme/hihg \(did you mean acme/high\?\)"):
        last("acme/hihg")
    with pytest.raises(hal.SelectionError, match="several ready implementations: acme/high, acme/low"):
        hal.bind("cpu", backend="acme")
    assert int(hal.bind("cpu", backend="acme/low").get_last_loc(TABLE, ZERO, TWO)[0]) == 1
    like = {"get_last_loc": (TABLE, ZERO, TWO.int())}
    assert int(hal.bind("cpu", backend="acme", like=like).get_last_loc(TABLE, ZERO, TWO)[0]) == 1
    assert hal.info()["ops"]["get_last_loc"]["acme"] == ["high: ready", "low: ready"]
    rows = hal.registry.table()["get_last_loc"]["acme"]
    assert [impl.name for impl, _ in rows] == ["high", "low"]
    plugins.add("one", manifest("one"))
    plugins.load()
    with pytest.raises(hal.SelectionError, match="one has no implementation one/x; known: none with a name of its own"):
        last("one/x")


@pytest.mark.usefixtures("fresh")
def test_register() -> None:
    assert hal.register("get_last_loc", backend="mine")(SEVEN) is SEVEN
    assert hal.register("get_last_loc", backend="mine")(SEVEN) is SEVEN
    assert last("mine") == 7
    with pytest.raises(hal.SelectionError, match=r"another implementation already; give it a name, or hal.unregister"):
        hal.register("get_last_loc", backend="mine")(EIGHT)
    hal.register("get_last_loc", backend="mine", name="b", priority=3)(EIGHT)
    assert last("mine") == last("mine/b") == 8
    with pytest.raises(hal.SelectionError, match="devices"):
        hal.register("kv_transfer", backend="mine", devices=("cuda",))(SEVEN)
    for taken in ("cpu", "auto", "reference"):
        with pytest.raises(hal.SelectionError, match="is taken"):
            hal.register("get_last_loc", backend=taken)(SEVEN)
    for bad in ({"backend": "Mine!"}, {"backend": "m", "devices": "cpu"}, {"backend": "m", "name": "a b"}):
        with pytest.raises(hal.SelectionError, match=r"register\('get_last_loc'\)"):
            hal.register("get_last_loc", **bad)(SEVEN)  # type: ignore[arg-type]
    with pytest.raises(hal.SelectionError, match="did you mean get_last_loc"):
        hal.register("get_last_lok", backend="mine")(SEVEN)
    hal.reload()
    assert last("mine") == 8
    with hal.use("mine"):
        hal.unregister("mine")
        with pytest.raises(hal.SelectionError, match="unknown backend mine"):
            last()
    assert last("reference") == 8


@pytest.mark.usefixtures("fresh")
def test_register_with_supports() -> None:
    hal.register(
        "get_last_loc",
        backend="mine",
        supports=lambda sig: "wide: i64" if sig["prefix_lens"].dtype == torch.int64 else None,
    )(SEVEN)
    with pytest.raises(hal.NoBackendError, match="wide: i64"):
        last("mine")
    assert int(hal.get_last_loc(TABLE, ZERO, TWO.int(), backend="mine")[0]) == 7


@pytest.mark.usefixtures("fresh")
def test_table_is_read_only() -> None:
    table = hal.registry.table()
    assert set(table) == set(hal.ops.BUILTIN)
    impl, state = table["get_last_loc"]["reference"][0]
    assert callable(impl.fn)
    assert state.ready
    assert {"reference", "cpu", "cuda", "ascend"} == set(table["kv_transfer"])
    with pytest.raises(TypeError):
        table["x"] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        table["get_last_loc"]["x"] = ()  # type: ignore[index]


def test_registry_has_no_other_names() -> None:
    assert all(hasattr(hal.registry, n) for n in hal.registry.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tabel'"):
        _ = hal.registry.tabel


def test_manifest_without_a_hook_is_a_plain_value() -> None:
    backend = Backend(
        "x", {"device": ["cpu"]}, {"a": Impl("m:f"), "b": [Impl("m:f", name="l"), Impl("m:g", name="h", priority=1)]}
    )
    assert [i.name for i in backend.impls("b")] == ["h", "l"]
    assert backend.impls("c") == ()
    assert Entry("x", None, "plugin").state().state == "broken"
