"""What these tests share: the ops, and one call judged by the op's oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec
from hal.ops.kv_transfer import stacked
from hal.ops.proofs.judge import Want, headroom, right_any, same_bits

OPS = [op for op in BUILTIN if not get_spec(op).core]


def samples() -> list[tuple[str, Any]]:
    return [(op, s) for op in OPS for s in get_spec(op).samples]


def judge(op: str, call: Callable[[dict[str, Any]], Any], make_args: Callable[[], dict[str, Any]]) -> None:
    """Runs `call` on fresh arguments: named elements right within the bound, all others as they were."""
    s = get_spec(op)
    args, before = make_args(), make_args()
    wants = s.oracle(before)
    result = call(args)
    if "return" not in wants:
        assert result is None
    elif "out" in wants and wants["return"] is wants["out"]:
        assert result is args["out"]
    for name, value in before.items():
        for half in ("k", "v") if isinstance(value, KVPool) else ("",):
            was, now = (getattr(x, half) if half else x for x in (value, args[name]))
            if was is None or not isinstance(was, Tensor | tuple):
                continue
            want = wants.get(name)
            if want is not None and half:
                want = want.fields.get(half)
            _right(f"{name}.{half}", stacked(now), stacked(was), want)
    if "return" in wants:
        _right("return", result, None, wants["return"])


def _right(name: str, got: Tensor, was: Tensor | None, want: Want | None) -> None:
    if want is not None:
        ok = right_any(got, want)
        assert bool(ok.all()), (
            f"{name}: {int((~ok).sum())} of {ok.numel()} wrong, first at {(~ok).nonzero()[0].tolist()}"
        )
        assert headroom(got, want) <= 1.0, name
    if was is not None:
        same = same_bits(got, was)
        assert bool((same if want is None else same | want.named).all()), (
            f"{name}: an unnamed element was written"
        )
