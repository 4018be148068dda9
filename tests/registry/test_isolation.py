"""One bad plugin is its own state and nothing else, whatever its code raises, its metadata hold, its import lasts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

import hal
from hal.registry import Backend, Impl, _isolate
from hal.registry._discover import Entry
from hal.registry._table import live

TABLE = torch.tensor([[7, 8]], dtype=torch.int32)
ZERO, TWO = torch.tensor([0]), torch.tensor([2])


def last(backend: str | None = None) -> int:
    return int(hal.get_last_loc(TABLE, ZERO, TWO, backend=backend)[0])


def entry(name: str) -> Entry:
    return live.current().entries[name]


def others_work() -> bool:
    """Of the host's own, and of the plugin `good`."""
    assert last("good") == 7
    assert last("reference") == 8
    assert entry("cpu").fault is None
    return True


# --- whatever is raised -----------------------------------------------------------------------------

FAULTS = {
    "exit": "raise SystemExit(3)",
    "exit-0": "import sys; sys.exit()",
    "keyboard": "raise KeyboardInterrupt",
    "keyboard-from": "raise KeyboardInterrupt('mine') from OSError('x')",
    "cancelled": "import asyncio; raise asyncio.CancelledError",
    "panic": "raise type('PanicException', (BaseException,), {})('called `Option::unwrap()`')",
    "outcome": "import pytest; pytest.skip('no device', allow_module_level=True)",
    "generator": "raise GeneratorExit",
    "unprintable": "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "group": "raise BaseExceptionGroup('several', [KeyboardInterrupt(), OSError()])",
}
KERNEL = "def get_last_loc(req_to_token, req_pool_indices, prefix_lens): return prefix_lens\n"


@pytest.fixture(params=sorted(FAULTS))
def fault(request: pytest.FixtureRequest) -> str:
    return FAULTS[request.param]


def test_import(plugins: Plugins, fault: str) -> None:
    plugins.add("acme", fault)
    plugins.add("good", manifest("good"))
    plugins.load()
    assert entry("acme").state().state == "broken"
    assert entry("acme").state().reason.startswith("importing acme raised")
    assert others_work()


@pytest.mark.parametrize("hook", ["hal_backend", "hal_ops"])
def test_hook(plugins: Plugins, fault: str, hook: str) -> None:
    plugins.add("acme", f"from hal.registry import hookimpl\n@hookimpl\ndef {hook}():\n    {fault}")
    plugins.add("good", manifest("good"))
    plugins.load()
    assert entry("acme").state().reason.startswith(f"its hook {hook} raised")
    assert others_work()


def test_probe(plugins: Plugins, fault: str) -> None:
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), f"{KERNEL}def probe():\n    {fault}")
    plugins.add("good", manifest("good"))
    plugins.load()
    assert entry("acme").state().reason.startswith("its probe raised")
    assert others_work()
    with pytest.raises(hal.NoBackendError, match="its probe raised"):
        last("acme")


def test_kernel_and_supports(plugins: Plugins, fault: str) -> None:
    plugins.add("acme", manifest("acme"), fault)
    ops = '{"get_last_loc": Impl("zeta_kernels:get_last_loc", supports="zeta_kernels:supports")}'
    plugins.add("zeta", manifest("zeta", ops=ops), f"{KERNEL}def supports(sig):\n    {fault}")
    plugins.add("good", manifest("good"))
    plugins.load()
    for name, where in (("acme", "importing acme_kernels:get_last_loc"), ("zeta", "its supports")):
        with pytest.raises(hal.NoBackendError, match=f"{where} raised"):
            last(name)
    assert others_work()


def test_observer(plugins: Plugins, fault: str) -> None:
    source = f"from hal.registry import hookimpl\n@hookimpl\ndef hal_on_bind(op):\n    {fault}"
    plugins.add("angry", source)
    plugins.add("good", manifest("good"))
    plugins.load()
    with pytest.warns(
        RuntimeWarning, match="observer angry .*: hal_on_bind raised .*; it is not called again"
    ):
        assert last("good") == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert others_work()


def test_status_and_warmup(plugins: Plugins, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme,good")
    tools = {"status": '"acme_kernels:tell"', "warmup": '"acme_kernels:warm"'}
    kernels = f"{KERNEL}def tell():\n    {fault}\ndef warm(ops, device):\n    {fault}"
    plugins.add("acme", manifest("acme", **tools), kernels)
    plugins.add("good", manifest("good"))
    plugins.load()
    acme = next(b for b in hal.info()["backends"] if b["name"] == "acme")
    assert " raised " in acme["status"]["status"]
    with pytest.raises(hal.BackendError, match="warmup: acme raised"):
        hal.warmup("cpu", backend="acme")
    assert last("good") == 7


def test_an_answer_that_has_no_text(plugins: Plugins) -> None:
    kernels = "class Odd:\n    def __repr__(self): raise OSError\ndef probe(): return Odd()\n"
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), kernels)
    plugins.add("good", manifest("good"))
    plugins.load()
    assert entry("acme").state().state == "broken"
    assert others_work()


# --- whose exception it is --------------------------------------------------------------------------

INTERRUPT = "import os, signal, time; os.kill(os.getpid(), signal.{name}); time.sleep(60)"


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("place", ["import", "probe", "supports", "observer"])
def test_ctrl_c_is_the_users(plugins: Plugins, place: str) -> None:
    body = INTERRUPT.format(name="SIGINT")
    ops = '{"get_last_loc": Impl("acme_kernels:get_last_loc", supports="acme_kernels:supports")}'
    fields = {"ops": ops, "probe": '"acme_kernels:probe"'}
    kernels = KERNEL
    for name in ("probe", "supports"):
        kernels += f"def {name}(*args):\n    {body if place == name else 'pass'}\n"
    source = (
        manifest("acme", **fields)
        + f"@hookimpl\ndef hal_on_bind():\n    {body if place == 'observer' else 'pass'}\n"
    )
    plugins.add("acme", (body if place == "import" else "") + "\n" + source, kernels)

    def load_and_call() -> None:
        plugins.load()
        last("acme")

    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        load_and_call()


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class _Server:
    def stop(self, number: int, frame: object) -> None:
        raise KeyboardInterrupt("terminated")

    def __call__(self, number: int, frame: object) -> None:
        raise OSError("alarm")


@pytest.mark.parametrize(
    ("handler", "expected"),
    [(_stop, SystemExit), (_Server().stop, KeyboardInterrupt), (_Server(), OSError)],
)
def test_what_a_signal_handler_raises_goes_on(
    plugins: Plugins, handler: Callable[..., None], expected: type[BaseException]
) -> None:
    body = INTERRUPT.format(name="SIGUSR1")
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), f"{KERNEL}def probe():\n    {body}")
    plugins.load()
    with handled(signal.SIGUSR1, handler), pytest.raises(expected):
        last("acme")


@pytest.mark.parametrize("then", ["raise", "raise SystemExit(1)", "raise OSError from None", "raise e"])
def test_ctrl_c_that_a_plugin_handles_on_its_way(plugins: Plugins, then: str) -> None:
    body = INTERRUPT.format(name="SIGINT")
    kernels = (
        f"{KERNEL}def probe():\n    try:\n        {body}\n    except KeyboardInterrupt as e:\n        {then}"
    )
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), kernels)
    plugins.load()
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        last("acme")


def test_a_fault_in_the_users_own_handling_of_ctrl_c(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), "def probe(): raise OSError('mine')")
    plugins.load()
    try:
        with handled(signal.SIGINT, signal.default_int_handler):
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        assert "its probe raised OSError: mine" in entry("acme").state().reason


# --- manifests --------------------------------------------------------------------------------------


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
    (tmp_path / "hal_acme-1.2.dist-info" / "entry_points.txt").write_text(
        "[hal.backends]\nacme = acme:PLUGIN\n"
    )
    plugins.add("good", manifest("good"))
    plugins.load()
    assert entry("acme").state().state == "broken"
    assert others_work()


# --- metadata ---------------------------------------------------------------------------------------


def damage(root: Path, what: str, hal_plugin: bool) -> None:
    info = root / "hal_acme-1.2.dist-info"
    points = info / "entry_points.txt"
    good = points.read_text() if hal_plugin else "[console_scripts]\nx = acme:x\n"
    points.write_text(good)
    if what == "no METADATA":
        (info / "METADATA").unlink()
    elif what == "empty METADATA":
        (info / "METADATA").write_text("")
    elif what == "no =":
        points.write_text(good + "nonsense\n")
    elif what == "not text":
        points.write_bytes(good.encode() + b"\xff\xfe")
    elif what == "a folder":
        points.unlink()
        points.mkdir()


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("what", ["no METADATA", "empty METADATA", "no =", "not text", "a folder"])
def test_damaged_metadata(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, what: str, plugin: bool) -> None:
    plugins.add("acme", manifest("acme"))
    plugins.add("good", manifest("good"))
    damage(plugins.root, what, plugin)
    plugins.load()
    assert others_work()
    broken = [e for e in live.current().entries.values() if "acme" in e.name]
    assert len(broken) == (plugin and what != "a folder")
    assert all(e.state().state == "broken" for e in broken)
    if plugin and what.endswith("METADATA"):
        assert "hal_acme-1.2.dist-info" in broken[0].state().reason
        assert broken[0].state().remedy == "pip install --force-reinstall hal-acme"
    monkeypatch.setenv("HAL_BACKEND", "reference")
    monkeypatch.setenv("HAL_PLUGINS", "good")
    plugins.load()
    assert last() == 8
    assert set(live.current().entries) == {"good"}


def test_a_requirement_whose_metadata_are_damaged(plugins: Plugins) -> None:
    plugins.add("needed", "")
    plugins.add("acme", manifest("acme", requires='("hal-needed>=1",)'))
    plugins.add("good", manifest("good"))
    (plugins.root / "hal_needed-1.2.dist-info" / "METADATA").unlink()
    (plugins.root / "hal_needed-1.2.dist-info" / "entry_points.txt").unlink()
    plugins.load()
    assert entry("acme").state().state == "absent"
    assert "needs hal-needed>=1; the metadata of the installed hal-needed" in entry("acme").state().reason
    assert others_work()


def test_a_finder_that_raises(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, *args: object) -> None: ...

        def find_distributions(self, context: object) -> Iterator[Any]:
            raise OSError("a zip that is none")

    plugins.add("good", manifest("good"))
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.warns(RuntimeWarning, match="Finder finds no plugins: .* OSError: a zip that is none"):
        plugins.load()
    assert others_work()


# --- time -------------------------------------------------------------------------------------------


class Heard:
    """A stand-in for stderr, and what waits until a line was written to it."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.text = ""
        self.said = threading.Event()

    def write(self, text: str) -> int:
        self.text += text
        if self.line in self.text:
            self.said.set()
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("import", "loading the plugin acme (hal-acme), after 0.01 s — HAL_PLUGINS=cpu,good leaves it out"),
        ("probe", "in the probe of acme, after 0.01 s"),
        ("kernel", "importing acme_kernels:get_last_loc, of the backend acme, after 0.01 s"),
    ],
)
def test_who_hangs_is_said(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, place: str, said: str) -> None:
    heard = Heard(f"hal: still {said}\n")
    monkeypatch.setattr(sys, "stderr", heard)
    monkeypatch.setattr(_isolate, "PATIENCE", 0.01)
    # It ends when it was named, or else after a minute.
    monkeypatch.setattr(sys, "hal_test_wait", heard.said.wait, raising=False)
    monkeypatch.setenv("HAL_PLUGINS", "cpu,acme,good")
    wait = "import sys; sys.hal_test_wait(60)\n"
    kernels = (wait if place == "kernel" else "") + KERNEL
    kernels += f"def probe():\n    {wait if place == 'probe' else 'pass'}"
    source = manifest("acme", **({"probe": '"acme_kernels:probe"'} if place == "probe" else {}))
    plugins.add("acme", (wait if place == "import" else "") + source, kernels)
    plugins.add("good", manifest("good"))
    plugins.load()
    assert last("acme") == 2
    assert heard.line in heard.text


def test_who_is_quick_is_not_named(plugins: Plugins, capfd: pytest.CaptureFixture[str]) -> None:
    plugins.add("acme", manifest("acme"))
    before = threading.active_count()
    plugins.load()
    assert last("acme") == 7
    assert "still" not in capfd.readouterr().err
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(60)
    assert threading.active_count() <= before


# --- the environment --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("HAL_BACKEND", "acme"), ("HAL_CHECKS", "off"), ("HAL_FALLBACK", "error"), ("HAL_LANE", "lowered"),
     ("HAL_PLUGINS", "acme"), ("HAL_BAKCEND", "a typo that would be an error")],
)  # fmt: skip
@pytest.mark.parametrize("place", ["import", "hook"])
def test_a_plugin_cannot_set_the_environment(plugins: Plugins, name: str, value: str, place: str) -> None:
    put = f"import os; os.environ[{name!r}] = {value!r}"
    source = manifest("acme")
    if place == "import":
        source = f"{put}\n{source}"
    else:
        source = source.replace("    return", f"    {put}\n    return")
    plugins.add("acme", source)
    plugins.add("good", manifest("good"))
    with pytest.warns(
        RuntimeWarning, match=rf"the plugin acme \(hal-acme\) changed {name} while it was loaded"
    ):
        plugins.load()
    before = vars(live.current())["environment"]
    assert (name in before.given, name in os.environ) == (False, False)
    assert hal.explain("get_last_loc", TABLE, ZERO, TWO).decided_by.startswith("auto")
    hal.configure(checks="args")
    hal.register("get_last_loc", backend="mine")(
        lambda req_to_token, req_pool_indices, prefix_lens: prefix_lens
    )
    with pytest.raises(hal.ArgumentError):
        hal.get_last_loc(TABLE, ZERO, "x")
    assert live.current().lane == "device"
    assert others_work()


def test_where_warnings_are_errors_a_plugin_still_stops_nothing(
    plugins: Plugins, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import os; os.environ['HAL_BACKEND'] = 'acme'\nfrom hal.registry import hookimpl\n"
    plugins.add("acme", f"{source}@hookimpl\ndef hal_on_bind(): raise OSError('angry')")
    plugins.add("good", manifest("good"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugins.load()
        assert others_work()
    said = capsys.readouterr().err
    assert "changed HAL_BACKEND while it was loaded" in said
    assert "OSError: angry" in said


def test_the_users_changes_are_seen_by_reload_alone(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.add("acme", manifest("acme"))
    plugins.load()
    monkeypatch.setenv("HAL_BACKEND", "acme")
    hal.configure(checks="args")
    hal.unregister("none")
    assert hal.explain("get_last_loc", TABLE, ZERO, TWO).decided_by.startswith("auto")
    hal.reload()
    assert last() == 7
    value = {v["name"]: v["value"] for v in hal.info()["environment"]}
    assert value["HAL_BACKEND"] == "acme"


def test_a_plugin_cannot_configure(plugins: Plugins) -> None:
    plugins.add("acme", "import hal\nhal.configure(backend='reference')\n" + manifest("acme"))
    plugins.add("good", manifest("good"))
    plugins.load()
    assert "SelectionError: hal: configure() by a plugin" in entry("acme").state().reason
    assert live.settings == {}
    assert others_work()


@pytest.mark.parametrize("text", [",", " , ,"])
def test_an_allow_list_that_names_nothing(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    plugins.add("acme", "raise OSError('must not be imported')")
    monkeypatch.setenv("HAL_PLUGINS", text)
    with pytest.raises(hal.SelectionError, match=r"HAL_PLUGINS=.*names no entry point; .* set it to none"):
        plugins.load()
    assert "acme" not in sys.modules


def test_an_allow_list_of_none(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", "raise OSError('must not be imported')")
    monkeypatch.setenv("HAL_PLUGINS", "none")
    plugins.load()
    assert live.current().entries == {}
    assert last("reference") == 8


def test_an_allow_list_with_a_typo(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", manifest("acme"))
    monkeypatch.setenv("HAL_PLUGINS", "cpu,acmee")
    with pytest.raises(
        hal.SelectionError,
        match=r"there is no entry point acmee \(did you mean acme\?\); there are: cpu, cuda, ascend, acme, or none",
    ):
        plugins.load()
