"""``hal new-backend``: a distribution that installs, with a stub of each op asked for, and a test that judges it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hal._devices import parse_device
from hal._env import did_you_mean
from hal._errors import ArgumentError, SelectionError
from hal._version import __version__
from hal.registry import current
from hal.registry._manifest import API, NAME
from hal.registry._points import RESERVED

if TYPE_CHECKING:
    from hal.ops.spec import OpSpec

COMMAND = "new-backend"
WIDTH = 100

_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1.0"
description = "The {name} backend of hal"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["hal-kernels>={hal}"]

[project.optional-dependencies]
test = ["hal-kernels[conformance]>={hal}"]

[project.entry-points."hal.backends"]
{name} = "{module}"

[tool.setuptools]
packages = ["{module}"]
"""
_MANIFEST = '''\
"""The manifest of {name}: data alone, so that listing backends imports no framework."""

from hal.registry import Backend, Impl, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="{name}",
        api={api},  # the plugin interface that it was written for
        lanes={{"device": ("{device}",)}},  # the device types whose tensors the kernels take
        ops={{
{ops}
        }},
        # requires=("acme-runtime>=2",),  not installed: "absent", with the pip command
        # probe="{module}.device:probe",  a function that returns None, or why this machine can't run it
        # limits={{"fp8": "no fp8 arithmetic on this chip"}},  what a `supports` may refuse
    )
'''
_STUB = '''\
"""{op} on {name}. The docstring is hal's contract, to which `hal conformance` holds the kernel."""

from __future__ import annotations

{imports}


{head}
{doc}
    raise NotImplementedError("{op}: to be written in {module}/{op}.py")
'''
_TEST = '''\
"""The backend, judged by hal's conformance suite: an op a test, its report in the test's output."""

import pytest
from hal.conformance import main

from {module} import hal_backend


@pytest.mark.parametrize("op", hal_backend().ops)
def test_conformance(op: str) -> None:
    assert main("{name}", ops=[op]) == 0
'''
_WORKFLOW = """\
name: conformance
on: [push, pull_request]
jobs:
  conformance:
    runs-on: {runner}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.11"}}
      - run: pip install -e ".[test]"
      - run: hal conformance {name}{chosen} --report report
      - uses: actions/upload-artifact@v4
        if: always()
        with: {{name: conformance, path: report}}
"""
_README = """\
# {distribution}

The `{name}` backend of hal (the distribution `hal-kernels`): {list}.

```sh
pip install -e ".[test]"          # hal finds the backend by its entry point
hal info                          # is it ready?
hal conformance {name}{chosen}    # what is right, what is wrong, what is missing
pytest                            # the same, an op a test
HAL_BACKEND={name} python serve.py  # {name} or an error; HAL_BACKEND="{name}>cpu": {name} where it can, else cpu
```

A kernel is `{module}/OP.py`; `python -c "import hal; help(hal.OP)"` prints its contract. A further op: its file, and a
line in `{module}/__init__.py`.
"""


def make(name: str, ops: Sequence[str], device: str, folder: Path | None) -> tuple[Path, list[str]]:
    """Writes a new backend's distribution.

    Args:
        name: the backend's, as in ``HAL_BACKEND``.
        ops: those to write a stub of.
        device: the device type whose tensors it takes.
        folder: one that is empty or not there; None: ``hal-backend-NAME`` here.

    Returns:
        The folder, and the names of the files in it.

    Raises:
        SelectionError: an unknown op, or a name that is taken.
        ArgumentError: a name that is none, no such device type, or a folder that holds something or can't be written.
    """
    if not NAME.fullmatch(name):
        expected = "lower case letters, digits, _ and -, as in acme"
        raise ArgumentError(COMMAND, "NAME", expected, repr(name) + did_you_mean(name, [name.lower()]))
    table = current()
    if name in RESERVED or name in table.entries:
        raise SelectionError(f"hal: {COMMAND}: there is a backend {name} already; choose another name")
    specs = [table.spec(op) for op in dict.fromkeys(ops)]
    kind = parse_device(COMMAND, "--device", device).type
    if kind not in ("cpu", "cuda", "npu"):
        raise ArgumentError(COMMAND, "--device", "cpu, cuda or npu", kind)
    root = Path(f"hal-backend-{name}") if folder is None else folder
    files = _files(name, specs, kind)
    try:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ArgumentError(COMMAND, "--dir", "a folder that is empty or not there", str(root))
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ArgumentError(COMMAND, "--dir", "a folder that can be written", f"{root}: {e.strerror}") from None
    return root, list(files)


def next_steps(root: Path, name: str, files: Sequence[str], ops: Sequence[str]) -> str:
    """What to do with it now."""
    return "\n".join(
        [
            f"wrote {root}:",
            *(f"  {file}" for file in files),
            "now:",
            f"  cd {root} && pip install -e .",
            *(f"  hal conformance {name} --op {op}   # says what is missing" for op in dict.fromkeys(ops)),
        ]
    )


def _files(name: str, specs: Sequence[OpSpec], device: str) -> dict[str, str]:
    module = f"hal_backend_{name.replace('-', '_')}"
    names = [s.name for s in specs]
    fill = {
        "name": name,
        "module": module,
        "distribution": f"hal-backend-{name}",
        "device": device,
        "hal": __version__,
        "ops": "\n".join(f'            "{op}": Impl("{module}.{op}:{op}"),' for op in names),
        "list": ", ".join(f"`{op}`" for op in names),
        "chosen": "".join(f" --op {op}" for op in names),
        "api": API,
        "runner": "ubuntu-latest" if device == "cpu" else f"[self-hosted, {device}]",
    }
    return {
        "pyproject.toml": _PROJECT.format_map(fill),
        "README.md": _README.format_map(fill),
        f"{module}/__init__.py": _MANIFEST.format_map(fill),
        **{f"{module}/{s.name}.py": _stub(s, name, module) for s in specs},
        "tests/test_conformance.py": _TEST.format_map(fill),
        ".github/workflows/conformance.yml": _WORKFLOW.format_map(fill),
    }


def _stub(spec: OpSpec, name: str, package: str) -> str:
    """The op's own signature and documentation around nothing: it raises until it is written."""
    head = signature(spec)
    imports = [f"from {module} import {word}" for module, word in _IMPORTS if word in head]
    doc = textwrap.indent(f'"""{spec.doc}\n"""', "    ", lambda line: bool(line.strip()))
    if "\\" in doc:
        doc = doc.replace('"""', 'r"""', 1)
    return _STUB.format(op=spec.name, name=name, module=package, imports="\n".join(imports), head=head, doc=doc)


def signature(spec: OpSpec) -> str:
    """``def op(...) -> ...:`` as source."""
    parts, star = [], False
    for p in spec.signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        value = f'"{p.default}"' if isinstance(p.default, str) else repr(p.default)
        default = "" if p.default is p.empty else f" = {value}"
        parts.append(f"{p.name}: {inspect.formatannotation(p.annotation).strip(_QUOTES)}{default}")
    returns = inspect.formatannotation(spec.signature.return_annotation).strip(_QUOTES)
    line = f"def {spec.name}({', '.join(parts)}) -> {returns}:"
    if len(line) <= WIDTH:
        return line
    return f"def {spec.name}(\n" + "".join(f"    {p},\n" for p in parts) + f") -> {returns}:"


_QUOTES = "'\""
_IMPORTS = (("hal", "KVPool"), ("torch", "Tensor"))
