"""The variables: typos, what `info` says of them, and plugins that would change them."""

from __future__ import annotations

import json
import os
import sys
import warnings

import pytest
from plugins import TABLE, TWO, ZERO, Plugins, entry, last, manifest, others_work

import hal
from hal.registry import current

# --- variables ---------------------------------------------------------------------------------------


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


# --- plugins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HAL_BACKEND", "acme"),
        ("HAL_CHECKS", "off"),
        ("HAL_FALLBACK", "error"),
        ("HAL_LANE", "lowered"),
        ("HAL_PLUGINS", "acme"),
        ("HAL_BAKCEND", "a typo that would be an error"),
    ],
)
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
    with pytest.warns(RuntimeWarning, match=rf"the plugin acme \(hal-acme\) changed {name} while it was loaded"):
        plugins.load()
    before = vars(current())["environment"]
    assert (name in before.given, name in os.environ) == (False, False)
    assert hal.explain("get_last_loc", TABLE, ZERO, TWO).decided_by.startswith("auto")
    hal.configure(checks="args")
    hal.register("get_last_loc", backend="mine")(lambda req_to_token, req_pool_indices, prefix_lens: prefix_lens)
    with pytest.raises(hal.ArgumentError):
        hal.get_last_loc(TABLE, ZERO, "x")
    assert current().lane == "device"
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


def test_the_users_changes_are_seen_by_reload_alone(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert current().settings == {}
    assert others_work()


@pytest.mark.parametrize("text", [",", " , ,"])
def test_an_allow_list_that_names_nothing(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    plugins.add("acme", "raise OSError('must not be imported')")
    monkeypatch.setenv("HAL_PLUGINS", text)
    with pytest.raises(hal.SelectionError, match=r"HAL_PLUGINS=.*names no entry point; .* set it to none"):
        plugins.load()
    assert "acme" not in sys.modules


def test_an_allow_list_of_none(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", "raise OSError('must not be imported')")
    monkeypatch.setenv("HAL_PLUGINS", "none")
    plugins.load()
    assert current().entries == {}
    assert last("reference") == 8


def test_an_allow_list_with_a_typo(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", manifest("acme"))
    monkeypatch.setenv("HAL_PLUGINS", "cpu,acmee")
    with pytest.raises(
        hal.SelectionError,
        match=r"there is no entry point acmee \(did you mean acme\?\); there are: cpu, cuda, ascend, acme, or none",
    ):
        plugins.load()
