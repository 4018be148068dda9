"""What a plugin declares, and the state that it puts the plugin in, with its reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from plugins import TABLE, TWO, ZERO, Plugins, entry, last, manifest, others_work

import hal
from hal.registry import API, Backend, Impl

# --- states ------------------------------------------------------------------------------------------


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
        ("from hal.registry import hookimpl\n@hookimpl\ndef hal_ops(): return 7", "it returned 7; expected OpSpecs"),
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
        (
            "def get_last_loc(req_to_token, req_pool_indices, lens): pass",
            "req_pool_indices, lens); the contract's is (req_to_token, req_pool_indices, prefix_lens)",
        ),
        ("def get_last_loc(req_to_token, req_pool_indices, prefix_lens=None): pass", "has the signature"),
        ("def get_last_loc(req_to_token, req_pool_indices, *, prefix_lens): pass", "has the signature"),
        ("def get_last_loc(*args): pass", "has the signature"),
    ],
)
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
    kernels = f"def get_last_loc(req_to_token, req_pool_indices, prefix_lens): pass\ndef supports(sig): {body}"
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


# --- manifests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("priority", "None", "priority: expected an integer; got None"),
        ("priority", "'1'", "priority: expected an integer"),
        ("priority", "True", "priority: expected an integer"),
        ("fn", "None", "fn: expected 'pkg.module:function'"),
        ("fn", "[]", "fn: expected 'pkg.module:function'"),
        ("supports", "3", "supports: expected 'pkg.module:function'"),
        ("probe", "()", "probe: expected 'pkg.module:function'"),
        ("name", "None", "name: expected a string"),
        ("note", "7", "note: expected a string"),
        ("install", "None", "install: expected a string"),
        ("graph_safe", "'no'", "graph_safe: expected True or False; got 'no'"),
        ("deterministic", "None", "deterministic: expected True or False"),
        ("requires", "None", "requires: expected a sequence of strings"),
    ],
)
def test_impl_is_checked_when_made(plugins: Plugins, field: str, value: str, expected: str) -> None:
    given = {"fn": '"acme_kernels:get_last_loc"', field: value}
    made = ", ".join(f"{k}={v}" for k, v in given.items())
    plugins.add("acme", manifest("acme", ops=f'{{"get_last_loc": Impl({made})}}'))
    plugins.add("good", manifest("good"))
    plugins.load()
    assert expected in entry("acme").state().reason
    assert others_work()
    assert hal.explain("get_last_loc", TABLE, ZERO, TWO).chosen is not None
    assert hal.bind("cpu", backend="good").get_last_loc(TABLE, ZERO, TWO).tolist() == [7]
    assert "get_last_loc" in hal.registry.table()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("limits", "None", "limits: expected name -> a sentence; got None"),
        ("limits", "{'small': 3}", "limits: expected name -> a sentence"),
        ("extra", "None", "extra: expected a string"),
        ("probe", "{'device': 3}", "probe['device']: expected 'pkg.module:function'"),
        ("probe", "3", "probe: expected 'pkg.module:function'"),
        ("warmup", "3", "warmup: expected"),
        ("status", "()", "status: expected"),
        ("inspect", "3", "inspect: expected"),
        ("tune", "3", "tune: expected"),
        ("waivers", "3", "waivers: expected a string"),
        ("ops", "{'get_last_loc': None}", "ops['get_last_loc']: expected an Impl or several; got None"),
        ("ops", "{'get_last_loc': 'x:y'}", "ops['get_last_loc']: expected an Impl or several; got 'x:y'"),
        ("ops", "{3: Impl('x:y')}", "the name of an op: expected a string; got 3"),
    ],
)
def test_backend_is_checked_when_made(plugins: Plugins, field: str, value: str, expected: str) -> None:
    plugins.add("acme", manifest("acme", **{field: value}))
    plugins.add("good", manifest("good"))
    plugins.load()
    assert expected in entry("acme").state().reason
    assert others_work()
    assert next(b for b in hal.info()["backends"] if b["name"] == "acme")["limits"] == {}


def test_a_manifest_is_read_once(plugins: Plugins) -> None:
    source = """
from hal.registry import Backend, Impl, hookimpl

class Own(Backend):
    def impls(self, op): raise OSError("no")

OPS = {"get_last_loc": Impl("acme_kernels:get_last_loc")}

@hookimpl
def hal_backend(): return Own("acme", {"device": ("cpu",)}, OPS)
"""
    plugins.add("acme", source)
    plugins.add("good", manifest("good"))
    plugins.load()
    sys.modules["acme"].OPS["get_last_loc"] = None  # type: ignore[attr-defined]
    assert last("acme") == 7
    assert others_work()


def test_an_implementation_that_can_be_no_key() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    with pytest.raises(TypeError, match="fn: expected"):
        Impl(Unhashable())
    with pytest.raises(TypeError, match="limits"):
        Backend("x", {"device": ("cpu",)}, {}, limits=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "default", ["numpy.zeros(2)", "torch.zeros(2)", "type('E', (), {'__eq__': lambda s, o: 1 / 0})()"]
)
def test_odd_defaults_in_a_signature(plugins: Plugins, default: str) -> None:
    head = "import numpy, torch\n"
    kernels = f"{head}def get_last_loc(req_to_token, req_pool_indices, prefix_lens={default}): pass"
    plugins.add("acme", manifest("acme"), kernels)
    plugins.add("good", manifest("good"))
    plugins.load()
    with pytest.raises(hal.NoBackendError, match="has the signature"):
        last("acme")
    assert others_work()


def test_a_plugin_object_that_compares_oddly(plugins: Plugins, tmp_path: Path) -> None:
    plugins.add("acme", "import numpy\nPLUGIN = numpy.zeros(3)")
    (tmp_path / "hal_acme-1.2.dist-info" / "entry_points.txt").write_text("[hal.backends]\nacme = acme:PLUGIN\n")
    plugins.add("good", manifest("good"))
    plugins.load()
    assert entry("acme").state().state == "broken"
    assert others_work()
