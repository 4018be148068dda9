"""A third party's backend ``acme`` for the CPU: hal's contracts' own code, under a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plugins import Plugins, manifest


def add(path: Path, ops: Sequence[str]) -> None:
    """Writes it into a folder, for processes that have that on their path, unless it is there."""
    if (path / "acme.py").exists():
        return
    kernels = ["from hal.ops import get_spec", *(f"{op} = get_spec({op!r}).reference" for op in ops)]
    listed = ", ".join(f'"{op}": Impl("acme_kernels:{op}")' for op in ops)
    Plugins(path).add("acme", manifest("acme", ops=f"{{{listed}}}"), kernels="\n".join(kernels) + "\n")
