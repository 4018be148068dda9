"""The code that was judged, and the suite's own, as hashes of files: a certificate says when it is of others.

Nothing is imported to look at it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import machinery, metadata, util
from pathlib import Path
from typing import Any

from hal.registry import _points
from hal.registry._points import BUILTIN
from hal.registry._requirements import DISTRIBUTION

HAL = Path(__file__).parent.parent
NOT_JUDGED = ("bench", "cli.py", "conformance", "demo", "engines", "__main__.py", "backends")
"""Of hal: the suite, which has a hash of its own, what no op runs, and the backends, of which one is judged."""
SUITE = ("conformance", "_remote", "ops", "kv", "_errors.py", "_host.py", "_memory.py")
SUFFIXES = frozenset(
    {
        ".c",
        ".cc",
        ".cpp",
        ".cu",
        ".cuh",
        ".h",
        ".hpp",
        ".json",
        ".ptx",
        ".cubin",
        ".py",
        ".pyd",
        ".pyx",
        ".so",
        ".dll",
        ".dylib",
    }
)


def code_of(backend: str, imports: Sequence[str] = ()) -> dict[str, Any]:
    """``{"files": {name: sha256}, "sha256": of all of them, "complete": whether the backend's own were found}``."""
    files: dict[str, Path] = {}
    for top in sorted(HAL.iterdir()):
        if top.name not in NOT_JUDGED:
            files |= {f"hal/{name}": path for name, path in under(top, top.name)}
    name = backend.partition("/")[0]
    if name in BUILTIN:
        own = dict(under(HAL / "backends" / "__init__.py", "hal/backends/__init__.py"))
        own |= dict(under(HAL / "backends" / name, f"hal/backends/{name}"))
    elif name == "reference":
        own = {"hal/ops/__init__.py": HAL / "ops" / "__init__.py"}
    else:
        own = {}
        for module in imports:
            own |= dict(_package(module.partition(".")[0], [str(Path.cwd())]))
        for point in _points.entry_points():
            if point.name == name and point.fault is None:
                own |= dict(_package(point.value.partition(":")[0].partition(".")[0]))
                own |= dict(_installed_files(point.dist))
    found = hashes({**files, **own})
    return {"files": found, "sha256": digest(found), "complete": bool(own)}


def suite_files() -> dict[str, Path]:
    """The sources that decide a verdict: the suite, who makes the calls, contracts, truths, pools."""
    return {f"hal/{name}": path for top in SUITE for name, path in under(HAL / top, top)}


def suite_hash() -> str:
    """SHA-256 over `suite_files`."""
    return digest(hashes(suite_files()))


def hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


def digest(found: Mapping[str, str]) -> str:
    """Of `hashes`, one."""
    return hashlib.sha256("".join(f"{n}\0{h}\n" for n, h in found.items()).encode()).hexdigest()


def changed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The files that are not what they were."""
    a, b = recorded["files"], now["files"]
    return sorted(n for n in {*a, *b} if a.get(n) != b.get(n))


def under(path: Path, name: str) -> Iterator[tuple[str, Path]]:
    """(name, file) of what can run, of a file or below a folder, which `name` names."""
    if path.is_file():
        if path.suffix in SUFFIXES:
            yield name, path
    elif path.is_dir() and path.name != "__pycache__":
        for child in sorted(path.iterdir()):
            yield from under(child, f"{name}/{child.name}")


def _package(top: str, path: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
    """The files of a top-level module or package, wherever an import would find it."""
    found = machinery.PathFinder.find_spec(top, list(path)) if path else None
    found = found or util.find_spec(top)
    if found is None:
        return
    if found.submodule_search_locations is None and found.origin:
        yield from under(Path(found.origin), Path(found.origin).name)
    for place in found.submodule_search_locations or ():
        yield from under(Path(place), top)


def _installed_files(dist: metadata.Distribution | None) -> Iterator[tuple[str, Path]]:
    """The files that a distribution has installed; of an editable one there are none."""
    for file in (dist.files or []) if dist is not None and dist.name != DISTRIBUTION else []:
        path = Path(str(file.locate()))
        if path.suffix in SUFFIXES and path.is_file() and not str(file).startswith("__editable__"):
            yield str(file), path
