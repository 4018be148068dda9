"""Puts what a run has proved into docs/conformance, of a report a case a line, so that a diff tells them apart:
``ci/certificates FOLDER``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

COMMITTED = Path(__file__).resolve().parents[1] / "docs" / "conformance"


def compact(report: dict[str, object]) -> str:
    """The same JSON: a line a field, of `cases` a line each."""
    fields = []
    for name, value in report.items():
        text = json.dumps(value)
        if name == "cases" and isinstance(value, list):
            text = "[\n" + ",\n".join("  " + json.dumps(case) for case in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def main(folder: str) -> int:
    found = sorted(Path(folder).glob("*/report.json"))
    for path in found:
        report = json.loads(path.read_text("utf-8"))
        if not report["verdict"]["certified"]:
            print(f"{path}: not certified, so not committed", file=sys.stderr)
            return 1
        there = COMMITTED / path.parent.name
        there.mkdir(exist_ok=True)
        (there / "report.json").write_text(compact(report), "utf-8")
        print(f"{there.relative_to(COMMITTED.parents[1])}: {len(report['cases'])} cases")
    names = ("sabotage-*.json", "*/inspect.json", "tests/*.json")
    others = [path for name in names for path in sorted(Path(folder).glob(name))]
    for proven in others:
        there = COMMITTED / proven.relative_to(folder)
        there.parent.mkdir(exist_ok=True)
        shutil.copy(proven, there)
        print(there.relative_to(COMMITTED.parents[1]))
    if not found and not others:
        print(f"ci/certificates: nothing that was proven in {folder}", file=sys.stderr)
    return int(not found and not others)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
