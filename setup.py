"""The readme of the distribution: README.md, whose relative links would lead nowhere from an index's page.

They lead to ``Source`` of ``[project.urls]``, at this version's tag; as long as there is none, what they say remains.
All else is in pyproject.toml.
"""

import runpy
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
version = runpy.run_path(str(ROOT / "hal/_version.py"))["__version__"]
relinked = runpy.run_path(str(ROOT / "ci/docs_text.py"))["relinked"]


def target(path: str) -> str | None:
    return f"{urls['Source'].rstrip('/')}/blob/v{version}/{path}" if "Source" in urls else None


setup(
    long_description=relinked((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", target, whole=False),
    long_description_content_type="text/markdown",
)
