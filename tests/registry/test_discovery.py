"""Finding plugins: names, damaged metadata, requirements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins import Plugins, entry, last, manifest, others_work

import hal
from hal.registry import current
from hal.registry._discover import missing, resolve

# --- names -------------------------------------------------------------------------------------------


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


def test_metadata_listed_twice_is_one_plugin(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugins.add("acme", manifest("acme"))
    other = tmp_path / "other"
    (other / "hal_acme-1.3.dist-info").mkdir(parents=True)
    (other / "hal_acme-1.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hal_acme\nVersion: 1.3\n")
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
    next(tmp_path.glob("*.dist-info/entry_points.txt")).write_text("[hal.backends]\nacme = acme:Holder.inner.plugin\n")
    plugins.load()
    assert last("acme") == 7


def test_allow_list(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", "raise SystemError('must not be imported')")
    plugins.add("good", manifest("good"))
    monkeypatch.setenv("HAL_PLUGINS", "cpu, good")
    plugins.load()
    assert set(current().entries) == {"cpu", "good"}
    assert hal.info()["blocked_plugins"] == ["cuda", "ascend", "acme"]
    assert last("good") == 7
    with pytest.raises(hal.SelectionError, match="HAL_PLUGINS keeps acme from loading"):
        last("acme")
    monkeypatch.setenv("HAL_PLUGINS", " ")
    plugins.load()
    assert entry("acme").state().state == "broken"


# --- metadata ----------------------------------------------------------------------------------------


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
    broken = [e for e in current().entries.values() if "acme" in e.name]
    assert len(broken) == (plugin and what != "a folder")
    assert all(e.state().state == "broken" for e in broken)
    if plugin and what.endswith("METADATA"):
        assert "hal_acme-1.2.dist-info" in broken[0].state().reason
        assert broken[0].state().remedy == "pip install --force-reinstall hal-acme"
    monkeypatch.setenv("HAL_BACKEND", "reference")
    monkeypatch.setenv("HAL_PLUGINS", "good")
    plugins.load()
    assert last() == 8
    assert set(current().entries) == {"good"}


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


# --- requirements ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wanted", "met"),
    # That `packaging` is asked, and of a release candidate as hal wants it; what it answers is its own tests' matter.
    [
        ("3.6.0", ">=3.6,<3.7", True),
        ("3.7.0", ">=3.6,<3.7", False),
        ("1.0", "", True),
        ("3.6.0rc1", ">=3.6", False),
        ("3.6.0rc1", "==3.6.0", False),
        ("3.6.0rc1", ">=3.5", True),
        ("3.7.0rc1", "<3.7", False),
        ("no version", ">=3", False),
    ],
)
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
