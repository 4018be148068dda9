"""What the generators of pages share: docstrings by section, lists, tables, links."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "Source")
_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^()\s]+)\)")


def sections(doc: str) -> dict[str, str]:
    """A docstring by section; the first, without a name, is what comes before."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(doc).splitlines():
        match = re.fullmatch(rf"({'|'.join(SECTIONS)}):\s*(.*)", line)
        if match:
            name = match[1]
            found[name] = [match[2]]
        else:
            found[name].append(line)
    return {n: inspect.cleandoc("\n".join(lines)) for n, lines in found.items()}


def markdown(text: str) -> str:
    return text.replace("``", "`")


def item_list(args: str) -> str:
    """The arguments' descriptions as a list."""
    items: list[str] = []
    for line in args.splitlines():
        match = re.match(r"(\w[\w, ]*): (.*)", line)
        if match:
            items.append(f"- `{match[1]}`: {match[2]}")
        else:
            items.append("  " + line.strip())
    return markdown("\n".join(items))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines)


def relinked(text: str, page: str, target: Callable[[str], str | None], whole: bool = True) -> str:
    """`text` with another target for each relative link; where there is none, what the link says remains.

    Args:
        text: Markdown.
        page: its path in the repository.
        target: path in the repository -> link.
        whole: the repository is all here (a source distribution is not).

    Raises:
        ValueError: a link leads to nothing.
    """

    def one(match: re.Match[str]) -> str:
        image, shown, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path, hash_, anchor = link.partition("#")
        full = os.path.normpath(os.path.join(os.path.dirname(page), path))
        if full.startswith("..") or (whole and not (ROOT / full).exists()):
            raise ValueError(f"{page}: the link {link} leads to nothing")
        found = target(full)
        return shown if found is None else f"{image}[{shown}]({found}{hash_}{anchor})"

    # Every other piece is a block of code.
    pieces = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(p if i % 2 else _LINK.sub(one, p) for i, p in enumerate(pieces))
