"""What these tests share: the ops beyond the core."""

from __future__ import annotations

from hal.ops import BUILTIN, get_spec

OPS = [op for op in BUILTIN if not get_spec(op).core]
