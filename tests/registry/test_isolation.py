"""One bad plugin is its own state and nothing else, whatever its code raises, however long it takes."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from plugins import KERNEL, Plugins, entry, last, manifest, others_work

import hal
from hal.registry import _isolate

# --- whatever is raised ------------------------------------------------------------------------------


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
    with pytest.warns(RuntimeWarning, match="observer angry .*: hal_on_bind raised .*; it is not called again"):
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


# --- whose exception it is ---------------------------------------------------------------------------


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
        manifest("acme", **fields) + f"@hookimpl\ndef hal_on_bind():\n    {body if place == 'observer' else 'pass'}\n"
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
    ("handler", "expected"), [(_stop, SystemExit), (_Server().stop, KeyboardInterrupt), (_Server(), OSError)]
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
    kernels = f"{KERNEL}def probe():\n    try:\n        {body}\n    except KeyboardInterrupt as e:\n        {then}"
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


# --- time --------------------------------------------------------------------------------------------


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
