"""Stand-in plugins: distributions with entry points, written to a folder that is put on ``sys.path``; and the one call
that tests of the registry make."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hal
from hal.registry import current
from hal.registry._discover import Entry
from hal.registry._table import Live, live

TABLE = torch.tensor([[7, 8]], dtype=torch.int32)
ZERO, TWO = torch.tensor([0]), torch.tensor([2])
KERNEL = "def get_last_loc(req_to_token, req_pool_indices, prefix_lens): return prefix_lens\n"

MANIFEST = """
from hal.registry import Backend, Impl, hookimpl

@hookimpl
def hal_backend():
    return Backend({arguments})
"""
KERNELS = """
import torch

def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    return torch.full_like(prefix_lens, {value})
"""


def last(backend: str | None = None, width: torch.dtype = torch.int64) -> int:
    """get_last_loc of a table whose answer is 8; the stand-ins answer with numbers of their own."""
    return int(hal.get_last_loc(TABLE, ZERO, TWO.to(width), backend=backend)[0])


def constant(value: int) -> Any:
    """A get_last_loc that answers `value`."""

    def fn(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        return torch.full_like(prefix_lens, value)

    return fn


def entry(name: str) -> Entry:
    return current().entries[name]


def others_work() -> bool:
    """Of the host's own, and of the plugin `good`."""
    assert last("good") == 7
    assert last("reference") == 8
    assert entry("cpu").fault is None
    return True


def manifest(plugin: str, /, **fields: str) -> str:
    """Source of a manifest: by default one that has get_last_loc for the CPU, in ``<plugin>_kernels``."""
    given = {
        "name": repr(plugin),
        "lanes": '{"device": ("cpu",)}',
        "ops": f'{{"get_last_loc": Impl("{plugin}_kernels:get_last_loc")}}',
        **fields,
    }
    return MANIFEST.format(arguments=", ".join(f"{k}={v}" for k, v in given.items()))


class Plugins:
    """Writes plugins into `root`; `load` makes hal see them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        name: str,
        source: str,
        kernels: str | None = None,
        *,
        dist: str = "",
        entry: str = "",
        requires: str = "",
        value: int = 7,
    ) -> None:
        dist = dist or f"hal-{name}"
        info = self.root / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n{needs}")
        module = name if dist == f"hal-{name}" else dist.replace("-", "_")
        (info / "entry_points.txt").write_text(f"[hal.backends]\n{entry or name} = {module}\n")
        (self.root / f"{module}.py").write_text(source)
        (self.root / f"{name}_kernels.py").write_text(KERNELS.format(value=value) if kernels is None else kernels)

    def load(self) -> None:
        hal.reload()


def hal_command(monkeypatch: pytest.MonkeyPatch, *args: str, columns: int | None = None) -> int:
    """`hal` in this process; its exit code."""
    from hal import cli

    monkeypatch.setattr(sys, "argv", ["hal", *args])
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as e:
        cli.main()
    return int(e.value.code or 0)


def forget_table() -> None:
    """As before anybody needed the table."""
    live.table = None


class Snapshot:
    """hal's process-wide state, put back on leaving; modules that came meanwhile are forgotten."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (
            "HAL_BACKEND",
            "HAL_FALLBACK",
            "HAL_CHECKS",
            "HAL_PLUGINS",
            "HAL_LANE",
            "HAL_ENGINES",
            "HAL_TRACE",
        ):
            # Set first: what a test's code puts there on its own is taken back as well.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        fresh = Live()
        self.old = {n: getattr(live, n) for n in vars(fresh) if n != "lock"}
        for n in self.old:
            setattr(live, n, getattr(fresh, n))
        self.modules = set(sys.modules)

    def restore(self, root: Path) -> None:
        for n, value in self.old.items():
            setattr(live, n, value)
        for name in set(sys.modules) - self.modules:
            if str(root) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
