"""Waivers: a backend's declared deviations, as data in the plugin's own package. Standard library only.

The manifest names them, ``waivers="pkg.module:WAIVERS"``: a list of dicts like

    {"kind": "notyet", "op": "rope_kv_write", "case": "value/e5m2-*", "reason": "...", "expires": "2027-06-30"}

``kind`` is ``notimpl`` (not there), ``notyet`` (wrong, will be mended) or ``never`` (wrong, by design).
``case`` is a glob over ``proof/name``. ``expires`` may be left out for ``never`` alone.
"""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("notimpl", "notyet", "never")


@dataclass(frozen=True)
class Waiver:
    kind: str
    op: str
    case: str
    reason: str
    expires: str | None = None

    def covers(self, case_id: str) -> bool:
        op, _, rest = case_id.partition("/")
        return op == self.op and fnmatch.fnmatchcase(rest, self.case)

    def __str__(self) -> str:
        until = f", until {self.expires}" if self.expires else ""
        return f"{self.kind} {self.op}/{self.case} ({self.reason}{until})"


def read(raw: Iterable[Mapping[str, Any]]) -> tuple[Waiver, ...]:
    """Waivers from data.

    Raises:
        ValueError: a key that is missing or unknown, a kind or date that can't be read.
    """
    out = []
    for i, item in enumerate(raw):
        extra = set(item) - {"kind", "op", "case", "reason", "expires"}
        lacking = {"kind", "op", "case", "reason"} - set(item)
        if extra or lacking:
            raise ValueError(f"waiver {i}: unknown {sorted(extra)}, missing {sorted(lacking)}")
        if item["kind"] not in KINDS:
            raise ValueError(f"waiver {i}: kind {item['kind']!r}; expected one of {', '.join(KINDS)}")
        expires = item.get("expires")
        if expires is None and item["kind"] != "never":
            raise ValueError(f"waiver {i}: a {item['kind']} waiver needs expires=YYYY-MM-DD")
        if expires is not None:
            datetime.date.fromisoformat(expires)
        out.append(Waiver(item["kind"], item["op"], item["case"], item["reason"], expires))
    return tuple(out)


def faults(waivers: Sequence[Waiver], outcomes: Mapping[str, str], today: str, ops: Sequence[str]) -> list[str]:
    """What is wrong with the waivers themselves: expired, matching nothing, or covering what passes."""
    out = []
    for w in waivers:
        if w.op not in ops:
            continue
        covered = [o for case, o in outcomes.items() if w.covers(case)]
        if w.expires is not None and w.expires < today:
            out.append(f"expired waiver: {w}")
        if not covered:
            out.append(f"waiver that matches no case: {w}")
        elif not any(o in ("failed", "not_run") for o in covered):
            out.append(f"waiver of what does not fail: {w}")
    return out
