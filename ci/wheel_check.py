"""Looks at an installed wheel and its source, from an empty directory: ``ci/wheel_check.py dist/*.whl dist/*.tar.gz``.

One top-level package; every module of it imports, or fails for nothing but a distribution that is not installed; every
entry point leads to something; no symbolic link and no test is inside; what type checkers and the suite need is. The
metadata are valid, and their description has no link that would lead nowhere from an index's page.
"""

from __future__ import annotations

import contextlib
import email
import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata

DISTRIBUTION = "hal-kernels"
NEEDED = ("hal/py.typed", "hal/_api.pyi", "hal/_bound.pyi", "hal/registry/_manifest.py", "hal/backends/cpu/__init__.py")
# Run on being imported, or by a foreign compiler alone: `python -m` what they are for.
PROGRAMS = ("__main__", "_worker")

# Other people's packages whose import is slow: made once for all children.
SLOW = ("torch", "numba", "triton.language", "transformers.modeling_utils")
SOURCES = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "ci/docs_text.py", "tests/conftest.py")


def main(wheel: str, sdist: str) -> int:
    wrong: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        links = [i.filename for i in archive.infolist() if i.external_attr >> 28 == 0xA]
        info = next(n for n in names if n.endswith(".dist-info/METADATA"))
        data = archive.read(info)
        head = email.message_from_bytes(data)
    top = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    if top != {"hal"}:
        wrong.append(f"top-level names: {sorted(top)}; expected hal alone")
    wrong += [f"a symbolic link: {n}" for n in links]
    wrong += [f"lacks {n}" for n in NEEDED if n not in names]
    if not any(n.endswith(".dist-info/licenses/LICENSE") for n in names):
        wrong.append("lacks the licence")
    if head["License-Expression"] != "Apache-2.0":
        wrong.append(f"licence: {head['License-Expression']}")

    wrong += described(data)
    with tarfile.open(sdist) as source:
        paths = {n.partition("/")[2]: n for n in source.getnames()}
        wrong += [f"{os.path.basename(sdist)} lacks {n}" for n in SOURCES if n not in paths]
        wrong += [f"{os.path.basename(sdist)} has {n}" for n in paths if "__pycache__" in n or ".venv" in n]
        told = source.extractfile(paths["PKG-INFO"])
        if told is None or told.read() != data:
            wrong.append("the source distribution's metadata are not the wheel's")

    import hal

    if not os.path.dirname(hal.__file__).startswith(sys.prefix):
        wrong.append(f"hal came from {hal.__file__}, not from the wheel")
    if metadata.version(DISTRIBUTION) != hal.__version__:
        wrong.append(f"version {metadata.version(DISTRIBUTION)} in the metadata, {hal.__version__} in the code")

    modules = sorted(
        n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in names if n.endswith(".py")
    )
    modules = [m for m in modules if m.rpartition(".")[2] not in PROGRAMS]
    absent: dict[str, list[str]] = {}
    # One process each: an import may depend on another's having been made, or stand in its way.
    for module, said in each(modules):
        if said.startswith("lacks "):
            absent.setdefault(said.removeprefix("lacks "), []).append(module)
        elif said:
            wrong.append(f"import {module}: {said}")

    points = list(metadata.distribution(DISTRIBUTION).entry_points)
    for point in points:
        try:
            point.load()
        except Exception as e:
            wrong.append(f"entry point {point.group} {point.name} = {point.value}: {type(e).__name__}: {e}")
    groups = {p.group for p in points}
    wrong += [f"no entry point in {g}" for g in ("console_scripts", "hal.backends") if g not in groups]

    for name, who in absent.items():
        print(f"not installed here: {name} (needed by {', '.join(who)})")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    print(f"{os.path.basename(wheel)}: {len(modules)} modules, {len(points)} entry points, {len(wrong)} wrong")
    return int(bool(wrong))


def described(data: bytes) -> list[str]:
    """What is wrong with the metadata that an index shows."""
    from packaging.metadata import Metadata

    try:
        found = Metadata.from_email(data, validate=True)
    except ExceptionGroup as e:
        return [f"metadata: {x}" for x in e.exceptions]
    wrong = [
        f"metadata: no {n}" for n in ("summary", "keywords", "classifiers", "description") if not getattr(found, n)
    ]
    if found.description_content_type != "text/markdown":
        wrong.append(f"metadata: the description's type is {found.description_content_type}")
    text = re.sub(r"^```.*?^```$", "", found.description or "", flags=re.M | re.S)
    links = re.findall(r"\]\(([^()\s]+)\)", text)
    return wrong + [f"the description has a relative link: {x}" for x in links if not re.match("https?://|#", x)]


def each(modules: list[str]) -> list[tuple[str, str]]:
    """Imports each module in a forked child: (module, '' or what was wrong)."""
    for name in SLOW:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    code = """
import sys
try:
    __import__(sys.argv[1])
except ModuleNotFoundError as e:
    name = (e.name or '').split('.')[0]
    print('lacks ' + name if name not in ('', 'hal') else repr(e))
except BaseException as e:
    print(f'{type(e).__name__}: {e}'.splitlines()[0])
"""
    found = []
    for module in modules:
        if hasattr(os, "fork"):
            found.append((module, forked(code, module)))
        else:
            ran = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, check=False)
            found.append((module, ran.stdout.strip() or (ran.stderr.strip() if ran.returncode else "")))
    return found


def forked(code: str, module: str) -> str:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.close(read)
        sys.argv = ["-c", module]
        try:
            exec(code, {})
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read().strip()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"the process died: {status}" if status else "")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
