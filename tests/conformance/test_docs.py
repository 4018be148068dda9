"""docs/writing-a-backend.md, executed; and the example plugins, installed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/writing-a-backend.md"


class Shell:
    """A shell in which ``pip install .`` installs into a folder of its own, and ``hal`` is this checkout's."""

    def __init__(self, folder: Path) -> None:
        self.site, self.bin, self.cwd = folder / "site", folder / "bin", folder / "work"
        for d in (self.site, self.bin, self.cwd):
            d.mkdir()
        python = sys.executable
        # Nothing may be fetched: what the plugins need is here.
        install = f"install -q --upgrade --no-deps --no-build-isolation --no-index --target {self.site} ."
        self._script(
            "pip", f"rm -rf build *.egg-info && exec {python} -m pip --disable-pip-version-check {install}"
        )
        self._script("hal", f'exec {python} -m hal "$@"')
        self._script("python", f'exec {python} "$@"')
        self._script("pytest", f'exec {python} -m pytest -p no:cacheprovider {self._plugin(python)} "$@"')

    def _plugin(self, python: str) -> str:
        shown = subprocess.run(
            [python, "-m", "pytest", "--help"], capture_output=True, text=True, cwd=self.cwd
        )
        return "" if "--hal-backend" in shown.stdout else "-p hal.conformance.pytest_plugin"

    def _script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def run(self, command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "PYTEST_"))}
        env |= {
            "PATH": f"{self.bin}{os.pathsep}{env['PATH']}", "COLUMNS": "200", "PAGER": "cat",
            "PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}",
        }  # fmt: skip
        return subprocess.run(
            ["sh", "-e", "-c", command], cwd=cwd or self.cwd, env=env, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def install(self, source: Path) -> None:
        copy = self.cwd / source.name
        shutil.copytree(source, copy)
        done = self.run("pip install .", copy)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def blocks(text: str) -> list[tuple[str, str]]:
    """(info string, body) of every fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.M | re.S)


def test_the_page_runs(shell: Shell) -> None:
    output = ""
    ran = 0
    for info, body in blocks(PAGE.read_text(encoding="utf-8")):
        kind, _, rest = info.partition(" ")
        if rest.startswith("file="):
            path = shell.cwd / rest.removeprefix("file=")
            path.parent.mkdir(exist_ok=True)
            path.write_text(body)
        elif kind == "sh":
            done = shell.run(body)
            output, ran = done.stdout, ran + 1
            assert (done.returncode != 0) == (rest == "fails"), f"{body}\n{output}"
        elif kind == "text":
            for line in body.strip("\n").splitlines():
                assert line.strip() in output, f"expected: {line}\ngot:\n{output}"
    assert ran >= 8


def test_the_page_builds_what_the_example_is() -> None:
    """One text: the page's last kernel is the example's."""
    kernel = [b for i, b in blocks(PAGE.read_text()) if i.endswith("get_last_loc.py")][-1]
    example = (ROOT / "examples/hal-backend-example/hal_backend_example/kernels.py").read_text()
    for line in kernel.splitlines():
        assert line in example


def test_the_example_is_small() -> None:
    folder = ROOT / "examples/hal-backend-example"
    files = [folder / "pyproject.toml", *folder.glob("*/*.py")]
    assert sum(len(f.read_text().splitlines()) for f in files) <= 60


def test_the_example_says_what_it_lacks(shell: Shell) -> None:
    shell.install(ROOT / "examples/hal-backend-example")
    got = shell.run("hal conformance example")
    assert got.returncode == 0, got.stdout
    assert "72 passed" in got.stdout
    for op in ("assign_extend_cache_locs", "rope_kv_write", "kv_transfer"):
        assert f"  {op}: not run (unimplemented: example has no {op}), all " in got.stdout
    certify = shell.run("hal conformance example --certify")
    assert certify.returncode == 1
    assert "NOT CERTIFIED" in certify.stdout


@pytest.mark.parametrize(
    ("name", "state", "why"),
    [
        ("import-error", "broken", "the vendor's library is of another version"),
        ("other-api", "incompatible", "it was written for api 2"),
        ("missing-requirement", "absent", "needs hal-vendor-runtime>=2"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_reason_and_judged_by_none(
    shell: Shell, name: str, state: str, why: str
) -> None:
    shell.install(ROOT / f"examples/broken/hal-backend-{name}")
    import json

    info: Any = json.loads(shell.run("hal info --json 2>/dev/null").stdout)
    (entry,) = [b for b in info["backends"] if b["name"] == name]
    assert json.dumps(entry["lanes"]).count(state) >= 1
    assert why in json.dumps(entry["lanes"])
    got = shell.run(f"hal conformance {name}")
    assert got.returncode in (2, 3), got.stdout
    works = shell.run(
        "python -c 'import torch, hal; t = torch.tensor([1]); "
        'print(hal.get_last_loc(torch.tensor([[7, 8]], dtype=torch.int32), t - 1, t, backend="reference"))\''
    )
    assert "tensor([7])" in works.stdout
