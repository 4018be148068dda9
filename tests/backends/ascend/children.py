"""Python in a process of its own, where it may end in a signal, or run in another lane."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(code: str, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """Run `code`, which may import this checkout and ``ascend``, the package of these tests."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "backends")))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**env, "PYTHONPATH": path},
        cwd=ROOT,
        check=False,
    )
