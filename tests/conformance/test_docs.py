"""docs/writing-a-backend.md, executed. The example plugins, installed: `ci/example`."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

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
        self._script("pip", f"rm -rf build *.egg-info && exec {python} -m pip --disable-pip-version-check {install}")
        self._script("hal", f'exec {python} -m hal "$@"')
        self._script("python", f'exec {python} "$@"')
        self._script("pytest", f'exec {python} -m pytest -p no:cacheprovider {self._plugin(python)} "$@"')

    def _plugin(self, python: str) -> str:
        shown = subprocess.run([python, "-m", "pytest", "--help"], capture_output=True, text=True, cwd=self.cwd)
        return "" if "--hal-backend" in shown.stdout else "-p hal.conformance.pytest_plugin"

    def _script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "PYTEST_"))}
        env |= {
            "PATH": f"{self.bin}{os.pathsep}{env['PATH']}",
            "COLUMNS": "200",
            "PAGER": "cat",
            "PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}",
        }
        return subprocess.run(
            ["sh", "-e", "-c", command],
            cwd=self.cwd,
            env=env,
            text=True,
            timeout=300,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


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
