"""What the site needs beyond mkdocs: README.md as its first page, links to the repository's other files.

A link to a page stays one. A link to a file that is no part of the site leads to `repo_url` where mkdocs.yml has one;
else what it says remains, since there is nowhere to lead. A link to nothing fails the build.
"""

from __future__ import annotations

import os
import re
from typing import Any

from docs_text import ROOT, relinked
from mkdocs.structure.files import File

START = "index.md"


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, START, content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.file.src_uri
    at = "README.md" if source == START else f"docs/{source}"

    def target(path: str) -> str | None:
        inside = path.removeprefix("docs/")
        if path == "README.md":
            inside = START
        elif path == inside or files.get_file_from_path(inside) is None:
            return f"{config.repo_url.rstrip('/')}/blob/main/{path}" if config.repo_url else None
        return os.path.relpath(inside, os.path.dirname(source) or ".")

    # Python-Markdown knows a block's language alone: what tests read behind it would make a paragraph of it.
    return re.sub(r"^(```\w+) .*$", r"\1", relinked(markdown, at, target), flags=re.M)
