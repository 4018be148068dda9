"""`hal new-backend`: what it writes installs, says what is missing, and goes green when it is filled in."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from plugins import Plugins
from plugins import hal_command as run

import hal
from hal import _scaffold
from hal.conformance import main
from hal.conformance._cases import cases_of
from hal.conformance._run import run_backend
from hal.ops import BUILTIN, get_spec

pytestmark = pytest.mark.usefixtures("fresh")
FILLED = """
    rows, width = req_to_token.shape
    request, length = req_pool_indices.long(), prefix_lens.long()
    ok = (request >= 0) & (request < rows) & (length > 0) & (length <= width)
    if not rows or not width:
        return torch.full_like(prefix_lens, -1)
    found = req_to_token[torch.where(ok, request, 0), torch.where(ok, length, 1) - 1]
    return torch.where(ok, found, -1).to(prefix_lens.dtype)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_stub_has_the_op_s_own_signature_and_documentation(here: Path) -> None:
    root, files = _scaffold.make("acme-2", BUILTIN, "cpu", None)
    assert root == Path("hal-backend-acme-2")
    assert sorted(files) == sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    for op in BUILTIN:
        text = (root / f"hal_backend_acme_2/{op}.py").read_text()
        names: dict[str, Any] = {}
        exec(compile(text, op, "exec"), names)
        contract = get_spec(op)
        assert inspect.signature(names[op]) == contract.signature
        assert inspect.getdoc(names[op]) == contract.doc
    manifest: dict[str, Any] = {}
    exec((root / "hal_backend_acme_2/__init__.py").read_text(), manifest)
    backend = manifest["hal_backend"]()
    assert (backend.name, set(backend.ops), backend.lanes) == ("acme-2", set(BUILTIN), {"device": ("cpu",)})
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["hal.backends"] == {"acme-2": "hal_backend_acme_2"}
    assert "hal conformance acme-2 --op get_last_loc" in (root / ".github/workflows/conformance.yml").read_text()
    for file in root.rglob("*.py"):
        ast.parse(file.read_text())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["Acme"], "NAME: expected lower case letters, digits, _ and -, as in acme; got 'Acme' (did you mean acme?)"),
        (["cpu"], "there is a backend cpu already"),
        (["auto"], "there is a backend auto already"),
        (["acme", "--op", "get_lost_loc"], "unknown op get_lost_loc (did you mean get_last_loc?)"),
        (["acme", "--device", "gpu"], "(did you mean cuda?)"),
        (["acme", "--device", "meta"], "--device: expected cpu, cuda or npu; got meta"),
        (["acme", "--dir", "full"], "--dir: expected a folder that is empty or not there; got full"),
        (["acme", "--dir", "full/file"], "--dir: expected a folder that is empty or not there"),
        (["acme", "--dir", "/proc/acme"], "--dir: expected a folder that can be written; got /proc/acme"),
    ],
)
def test_what_it_refuses(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    (here / "full").mkdir()
    (here / "full/file").write_text("mine")
    assert run(monkeypatch, "new-backend", *args) == 2
    assert says in capsys.readouterr().err
    assert [p.name for p in here.iterdir()] == ["full"]
    assert (here / "full/file").read_text() == "mine"


def test_from_nothing_to_a_green_op(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plugins: Plugins
) -> None:
    assert run(monkeypatch, "new-backend", "acme", "--op", "get_last_loc", "--op", "kv_write") == 0
    said = capsys.readouterr().out
    assert "cd hal-backend-acme && pip install -e ." in said
    assert "hal conformance acme --op get_last_loc" in said
    root = here / "hal-backend-acme"
    site = here / "site"
    pip = "-m pip install -q --no-deps --no-build-isolation --no-index --disable-pip-version-check --target".split()
    done = subprocess.run(
        [sys.executable, *pip, str(site), str(root)], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(site))
    hal.reload()
    assert hal.info()["ops"]["kv_write"]["acme"] == ["ready"]

    assert main("acme", ops=["get_last_loc"]) == 1
    missing = capsys.readouterr().out
    assert "NotImplementedError: get_last_loc: to be written in hal_backend_acme/get_last_loc.py" in missing
    stub = site / "hal_backend_acme/get_last_loc.py"
    head, _, _ = stub.read_text().rpartition("    raise NotImplementedError")
    stub.write_text(head.replace("from torch import Tensor", "import torch\nfrom torch import Tensor") + FILLED)
    cases = [c for c in cases_of(get_spec("get_last_loc")) if c.proof in ("value", "pages", "errors", "extremes")]
    outcome = run_backend("acme", "device", ["get_last_loc"], cases)
    assert {r.outcome for r in outcome.results.values()} == {"passed"}, outcome.fatal
