"""Plugins: every state with its reason, isolation from each other and from the host, ops of their own, observers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

import hal
from hal.registry import API, Backend, Impl
from hal.registry._discover import Entry, missing, resolve
from hal.registry._table import live

TABLE = torch.tensor([[7, 8]], dtype=torch.int32)
ZERO, TWO = torch.tensor([0]), torch.tensor([2])


def last(backend: str | None = None) -> int:
    return int(hal.get_last_loc(TABLE, ZERO, TWO, backend=backend)[0])


def entry(name: str) -> Entry:
    return live.current().entries[name]


# --- states -----------------------------------------------------------------------------------------


def test_ready(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme"))
    plugins.load()
    assert entry("acme").state().ready
    assert str(entry("acme").state()) == "ready"
    assert entry("acme").op_state("kv_transfer").state == "unimplemented"
    assert entry("acme").op_state("get_last_loc").ready
    assert last("acme") == 7
    info = next(b for b in hal.info()["backends"] if b["name"] == "acme")
    assert (info["origin"], info["distribution"]) == ("plugin", "hal-acme")
    assert hal.info()["ops"]["get_last_loc"]["acme"] == ["ready"]


@pytest.mark.parametrize(
    ("fields", "state", "reason", "remedy"),
    [
        ({"requires": '("acme_rt>=2",)'}, "absent", "needs acme_rt>=2", 'pip install "acme_rt>=2"'),
        ({"requires": '("torch>=99",)'}, "absent", "is installed", 'pip install "torch>=99"'),
        (
            {"requires": '{"device": ("acme_rt",)}', "extra": '"gpu"'},
            "absent",
            "needs acme_rt",
            'pip install "hal-acme[gpu]"',
        ),
        ({"requires": '("???",)'}, "absent", "can't be read", "???"),
        ({"api": "99"}, "incompatible", f"api 99; this hal has {API}", "install a hal-acme"),
        ({"probe": '"acme_kernels:probe"'}, "unavailable", "no such device", "plug one in"),
        ({"probe": '{"device": "acme_kernels:probe"}'}, "unavailable", "no such device", "plug one in"),
        ({"probe": '"acme_kernels:raises"'}, "broken", "its probe raised OSError: no driver", ""),
        ({"probe": '"acme_kernels:leaves"'}, "broken", "its probe raised SystemExit", ""),
        ({"probe": '"acme_kernels:wrong"'}, "broken", "its probe returned False", ""),
        ({"probe": '"acme_kernels"'}, "broken", "expected pkg.module:function", ""),
        ({"probe": '"acme_kernels:VALUE"'}, "broken", "is a int, not a function", ""),
        ({"name": "'Acme!'"}, "broken", "expected lower case letters", ""),
        ({"name": "'cuda'"}, "broken", "the name cuda is reserved", ""),
        ({"name": "'auto'", "api": "99"}, "broken", "the name auto is reserved", ""),
        ({"name": "7"}, "broken", "the backend's name 7", ""),
        ({"lanes": "{}"}, "broken", "lanes: expected", ""),
        ({"lanes": '{"device": "cpu"}'}, "broken", "expected a sequence of strings; got 'cpu'", ""),
        ({"lanes": '{"devices": ("cpu",)}'}, "broken", "unknown lane 'devices'", ""),
        ({"requires": '"numpy"'}, "broken", "requires: expected a sequence of strings", ""),
        ({"ops": "[]"}, "broken", "ops: expected op -> Impl", ""),
        ({"ops": '{"get_last_loc": ["x:y"]}'}, "broken", "expected an Impl or several", ""),
        ({"ops": '{"get_last_loc": Impl("x:y", name="a b")}'}, "broken", "the name 'a b'", ""),
        ({"ops": '{"get_last_loc": (Impl("x:y"), Impl("x:z"))}'}, "broken", "have one name", ""),
    ],
)
def test_state(plugins: Plugins, fields: dict[str, str], state: str, reason: str, remedy: str) -> None:
    kernels = """
def get_last_loc(req_to_token, req_pool_indices, prefix_lens): return prefix_lens
def probe(): return "no such device — plug one in"
def raises(): raise OSError("no driver")
def leaves(): raise SystemExit(3)
def wrong(): return False
VALUE = 3
"""
    plugins.add("acme", manifest("acme", **fields), kernels)
    plugins.load()
    got = entry("acme").state()
    assert got.state == state
    assert reason in got.reason
    assert remedy in got.remedy
    assert bool(got.detail) == ("raised" in got.reason or "hook" in got.reason)
    with pytest.raises(hal.NoBackendError, match=state):
        last("acme")
    assert last("reference") == 8
    assert entry("cpu").origin == entry("cuda").origin == "built-in"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('no lib')", "importing acme raised OSError: no lib"),
        ("import sys; sys.exit(3)", "importing acme raised SystemExit"),
        ("import acme_lacks_this", "ModuleNotFoundError"),
        ("def hal_backend(): pass", "has no hook hal_backend"),
        (
            "from hal.registry import hookimpl\n@hookimpl\ndef hal_backend(): return 7",
            "returned 7; expected a hal.registry.Backend",
        ),
        (
            "from hal.registry import hookimpl\n@hookimpl\ndef hal_backend(): raise OSError('x')",
            "its hook hal_backend raised OSError",
        ),
        ("from hal.registry import hookimpl\n@hookimpl\ndef hal_backend(funny): pass", "its hooks raised"),
        (
            "from hal.registry import hookimpl\n@hookimpl\ndef hal_ops(): return 7",
            "it returned 7; expected OpSpecs",
        ),
    ],
)
def test_broken_manifest(plugins: Plugins, source: str, reason: str) -> None:
    plugins.add("acme", source)
    plugins.add("good", manifest("good"))
    plugins.load()
    state = entry("acme").state()
    assert state.state == "broken"
    assert reason in state.reason
    assert entry("acme").state("lowered") is state
    assert last("good") == 7
    assert hal.info()["ops"]["get_last_loc"]["acme"] == ["unimplemented"]


def test_incompatible_by_distribution(plugins: Plugins) -> None:
    plugins.add("acme", "import acme_lacks_this", requires="hal_kernels>=99")
    plugins.load()
    state = entry("acme").state()
    assert state.state == "incompatible"
    assert state.reason == f"hal-acme 1.2 needs hal-kernels>=99; this is hal-kernels {hal.__version__}"
    assert "install a hal-acme" in state.remedy


def test_excluded_but_importable_is_taken_as_it_is(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme"), requires="hal-kernels>=99")
    plugins.load()
    assert entry("acme").state().ready


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        ("raise OSError('no lib')", "importing acme_kernels:get_last_loc raised OSError"),
        ("", "AttributeError"),
        ("def get_last_loc(req_to_token, req_pool_indices, lens): pass",
         "req_pool_indices, lens); the contract's is (req_to_token, req_pool_indices, prefix_lens)"),
        ("def get_last_loc(req_to_token, req_pool_indices, prefix_lens=None): pass", "has the signature"),
        ("def get_last_loc(req_to_token, req_pool_indices, *, prefix_lens): pass", "has the signature"),
        ("def get_last_loc(*args): pass", "has the signature"),
    ],
)  # fmt: skip
def test_broken_kernel(plugins: Plugins, kernels: str, reason: str) -> None:
    plugins.add("acme", manifest("acme"), kernels)
    plugins.load()
    assert entry("acme").state().ready
    for _ in range(2):
        with pytest.raises(hal.NoBackendError) as e:
            last("acme")
        assert reason in str(e.value)
    told = hal.explain("get_last_loc", TABLE, ZERO, TWO, backend="acme")
    assert told.chosen is None
    assert told.verdicts[0].state == "broken"


@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        ("raise KeyError('q')", "broken", "its supports raised KeyError"),
        ("return False", "broken", "its supports returned False"),
        ("return True", "broken", "its supports returned True"),
        ("return 'width: too wide'", "rejected", "width: too wide"),
    ],
)
def test_supports(plugins: Plugins, body: str, state: str, reason: str) -> None:
    kernels = (
        f"def get_last_loc(req_to_token, req_pool_indices, prefix_lens): pass\ndef supports(sig): {body}"
    )
    ops = '{"get_last_loc": Impl("acme_kernels:get_last_loc", supports="acme_kernels:supports")}'
    plugins.add("acme", manifest("acme", ops=ops), kernels)
    plugins.load()
    with pytest.raises(hal.NoBackendError, match=reason):
        last("acme")
    assert hal.explain("get_last_loc", TABLE, ZERO, TWO, backend="acme").verdicts[0].state == state


def test_supports_sees_the_signature(plugins: Plugins) -> None:
    kernels = """
SEEN = []
def get_last_loc(req_to_token, req_pool_indices, prefix_lens): return prefix_lens
def supports(sig): SEEN.append(sig)
"""
    ops = '{"get_last_loc": Impl("acme_kernels:get_last_loc", supports="acme_kernels:supports")}'
    plugins.add("acme", manifest("acme", ops=ops), kernels)
    plugins.load()
    for _ in range(3):
        assert last("acme") == 2
    import acme_kernels  # type: ignore[import-not-found]

    (sig,) = acme_kernels.SEEN
    assert (sig.op, sig.device, sig["prefix_lens"].dtype) == ("get_last_loc", "cpu", torch.int64)


# --- names ------------------------------------------------------------------------------------------


def test_two_distributions_with_one_name(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme"))
    plugins.add("acme", manifest("acme"), dist="other-acme")
    plugins.load()
    state = entry("acme").state()
    assert state.state == "broken"
    assert {"hal-acme", "other-acme"} <= set(state.reason.replace(":", "").split())
    assert "HAL_PLUGINS" in state.remedy
    with pytest.raises(hal.NoBackendError, match="two distributions"):
        last("acme")


def test_metadata_listed_twice_is_one_plugin(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugins.add("acme", manifest("acme"))
    other = tmp_path / "other"
    (other / "hal_acme-1.3.dist-info").mkdir(parents=True)
    (other / "hal_acme-1.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hal_acme\nVersion: 1.3\n"
    )
    (other / "hal_acme-1.3.dist-info" / "entry_points.txt").write_text("[hal.backends]\nacme = acme\n")
    monkeypatch.syspath_prepend(str(other))
    plugins.load()
    assert last("acme") == 7


@pytest.mark.parametrize("name", ["cpu", "cuda", "auto", "reference"])
def test_reserved_entry_point_harms_no_built_in(plugins: Plugins, name: str) -> None:
    plugins.add("acme", manifest("acme"), entry=name)
    plugins.load()
    assert entry(f"{name} (hal-acme)").state().state == "broken"
    assert "reserved" in entry(f"{name} (hal-acme)").state().reason
    assert entry("cpu").fault is None
    assert entry("cuda").fault is None


def test_one_entry_point_with_several_backends(plugins: Plugins) -> None:
    source = manifest("acme").replace(
        "return Backend(", "return [Backend(name='zeta', lanes={'device': ('cpu',)}, ops={}), Backend("
    )
    plugins.add("acme", source.rstrip() + "]\n")
    plugins.load()
    assert entry("zeta").state().ready
    assert last("acme") == 7
    with pytest.raises(hal.NoBackendError, match="unimplemented"):
        last("zeta")


def test_entry_point_names_an_object(plugins: Plugins, tmp_path: Path) -> None:
    source = "class Holder:\n    class inner:\n        pass\n" + manifest("acme")
    source = source.replace("@hookimpl", "").replace("def hal_backend", "def made") + (
        "class Plugin:\n    @hookimpl\n    def hal_backend(self): return made()\nHolder.inner.plugin = Plugin()\n"
    )
    plugins.add("acme", source)
    next(tmp_path.glob("*.dist-info/entry_points.txt")).write_text(
        "[hal.backends]\nacme = acme:Holder.inner.plugin\n"
    )
    plugins.load()
    assert last("acme") == 7


def test_allow_list(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", "raise SystemError('must not be imported')")
    plugins.add("good", manifest("good"))
    monkeypatch.setenv("HAL_PLUGINS", "cpu, good")
    plugins.load()
    assert set(live.current().entries) == {"cpu", "good"}
    assert hal.info()["blocked_plugins"] == ["cuda", "ascend", "acme"]
    assert last("good") == 7
    with pytest.raises(hal.SelectionError, match="HAL_PLUGINS keeps acme from loading"):
        last("acme")
    monkeypatch.setenv("HAL_PLUGINS", " ")
    plugins.load()
    assert entry("acme").state().state == "broken"


# --- ops of a plugin's own --------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    "first", ["from hal.ops.kv_move import SPEC", "import hal; hal.kv_move", "import hal.ops"]
)
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


# --- observers --------------------------------------------------------------------------------------

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
    assert set(live.current().entries) == {"acme"}
    with pytest.warns(
        RuntimeWarning, match="observer angry .*: hal_on_fallback raised OSError: angry"
    ) as caught:
        assert last() == 8
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last() == 8
        assert int(hal.get_last_loc(TABLE, ZERO.int(), TWO)[0]) == 8
    import angry  # type: ignore[import-not-found]
    import watch  # type: ignore[import-not-found]

    one = [("reject", "acme", "small: no"), ("fallback", "get_last_loc", "acme", "small: no"),
           ("bind", "get_last_loc", "reference", "device")]  # fmt: skip
    assert [*one, *one] == watch.TOLD
    assert one[:1] == angry.TOLD


# --- several implementations, registration, the table ------------------------------------------------


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
    assert [(v.name, v.state) for v in told.verdicts[:2]] == [
        ("acme/high", "rejected"),
        ("acme/low", "chosen"),
    ]
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
    with pytest.raises(
        hal.SelectionError, match="one has no implementation one/x; known: none with a name of its own"
    ):
        last("one/x")


def seven(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    return torch.full_like(prefix_lens, 7)


def eight(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    return torch.full_like(prefix_lens, 8)


@pytest.mark.usefixtures("fresh")
def test_register() -> None:
    assert hal.register("get_last_loc", backend="mine")(seven) is seven
    assert hal.register("get_last_loc", backend="mine")(seven) is seven
    assert last("mine") == 7
    with pytest.raises(
        hal.SelectionError, match=r"another implementation already; give it a name, or hal.unregister"
    ):
        hal.register("get_last_loc", backend="mine")(eight)
    hal.register("get_last_loc", backend="mine", name="b", priority=3)(eight)
    assert last("mine") == last("mine/b") == 8
    with pytest.raises(hal.SelectionError, match="devices"):
        hal.register("kv_transfer", backend="mine", devices=("cuda",))(seven)
    for taken in ("cpu", "auto", "reference"):
        with pytest.raises(hal.SelectionError, match="is taken"):
            hal.register("get_last_loc", backend=taken)(seven)
    for bad in ({"backend": "Mine!"}, {"backend": "m", "devices": "cpu"}, {"backend": "m", "name": "a b"}):
        with pytest.raises(hal.SelectionError, match=r"register\('get_last_loc'\)"):
            hal.register("get_last_loc", **bad)(seven)  # type: ignore[arg-type]
    with pytest.raises(hal.SelectionError, match="did you mean get_last_loc"):
        hal.register("get_last_lok", backend="mine")(seven)
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
    )(seven)
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
        "x",
        {"device": ["cpu"]},
        {"a": Impl("m:f"), "b": [Impl("m:f", name="l"), Impl("m:g", name="h", priority=1)]},
    )
    assert [i.name for i in backend.impls("b")] == ["h", "l"]
    assert backend.impls("c") == ()
    assert Entry("x", None, "plugin").state().state == "broken"


# --- requirements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wanted", "met"),
    [
        ("3.6.0", ">=3.6,<3.7", True), ("3.7.0", ">=3.6,<3.7", False), ("3.6.0+git1", "==3.6", True),
        ("3.6.1", "==3.6", False),
        ("3.6.1", "==3.6.*", True), ("3.7", "==3.6.*", False), ("3.6.1", "!=3.6.*", False), ("3.7", "!=3.6.*", True),
        ("3.6", "!=3.6.0", False), ("2.10", ">2.9", True), ("2.10", "<=2.9", False), ("1.4.5", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False), ("1.5.0", "~=1.4", True), ("2.0", "~=1.4", False), ("1.0", "", True),
        ("3.6.0rc1", ">=3.6", False), ("3.6.0rc1", "==3.6.0", False), ("3.6.0rc1", ">=3.5", True),
        ("3.7.0rc1", "<3.7", False), ("1!2.0", ">=3", True), ("no version", ">=3", False),
    ],
)  # fmt: skip
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, wanted: str, met: bool) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert (missing(f"acme{wanted}") == "") is met


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("torch", ""),
        ("torch[opt] (>=1.0) ; python_version > '3'", ""),
        ("no-such-dist>=1", "needs no-such-dist>=1"),
        ("no-such-dist ; sys_platform == 'no-such-platform'", ""),
        ("no-such-dist>=1 ; sys_platform != 'no-such-platform'", "needs no-such-dist>=1"),
        ("torch>=99; sys_platform=='no-such-platform'", ""),
        ("no-such-dist ; extra == 'gpu'", ""),
        ("a b c", "its requirement 'a b c' can't be read"),
        ("torch nonsense", "its requirement"),
        ("torch ; nonsense == '1'", "its requirement"),
    ],
)
def test_missing(requirement: str, said: str) -> None:
    assert missing(requirement).startswith(said)
    assert bool(missing(requirement)) == bool(said)


def test_resolve() -> None:
    assert resolve("os.path:join") is resolve(resolve("os.path:join"))
    with pytest.raises(hal.BackendError, match="not a function"):
        resolve("os:sep")
