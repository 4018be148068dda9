"""Whether a call did what the contract says: every result, and every byte that is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.conformance._arena import Placed
from hal.conformance._block import Block
from hal.ops.proofs.judge import Want, headroom, right_any, same_bits
from hal.ops.spec import SHORT


class Failure(Exception):
    """The backend did not do what the contract says; the text says where."""


@dataclass(frozen=True)
class Ret:
    """What a call returned, as far as the process that made it says; the values are read here.

    Args:
        kind: ``none``, ``tensor`` or ``other``. type: of the object. names: the arguments that it is.
        dtype, shape, device, shown: a tensor's. values: those of a new one, copied out.
    """

    kind: str = "none"
    type: str = "NoneType"
    names: tuple[str, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = ""
    shown: str = ""
    values: Tensor | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any], placed: Placed) -> Ret:
        """From the answer of another process, whatever that is."""
        kind = str(said["kind"])
        if kind != "tensor":
            return cls(kind, "NoneType" if kind == "none" else str(said["type"]))
        shape = tuple(int(n) for n in said["shape"])
        dtype = next((d for d, name in SHORT.items() if name == said["dtype"]), None)
        size = math.prod(shape) * (dtype.itemsize if dtype else 0)
        start, most = placed.arguments.result
        values = None
        if said["stored"] is True and dtype is not None and min(shape, default=0) >= 0 and size <= most:
            raw = placed.arena.memory.raw(start, start + size)
            values = raw.clone().view(dtype).view(shape)
        names = tuple(str(n) for n in said["is"])
        return cls(kind, "Tensor", names, str(said["dtype"]), shape, str(said["device"]), str(said["shown"]), values)


def judge(wants: Mapping[str, Want], placed: Placed, ret: Ret, device: str) -> dict[str, float]:
    """The headroom by dtype, if all is right.

    Raises:
        Failure: a result is wrong, a byte that the contract does not name has changed, or the return
            value is not what it should be.
    """
    problems: list[str] = []
    room: dict[str, float] = {}
    placed.take()
    flat = _flat(wants, placed)
    truths = {label: want for label, want, _ in flat}
    for label, want, block in flat:
        got = block.values()
        before = block.values_before()
        problems += _results(label, got, want, before, truths)
        _note(room, got, want)
    named = {id(block): want.named for _, want, block in flat}
    for block in placed.all():
        changed = block.changes(named.get(id(block)))
        if changed is not None:
            problems.append(changed)
    problems += _judge_return(wants, placed, ret, device, room)
    if problems:
        raise Failure("; ".join(problems[:4]))
    return room


def _flat(wants: Mapping[str, Want], placed: Placed) -> list[tuple[str, Want, Block]]:
    """(label, what it must be, where it lies), a pool taken apart into its halves and layers."""
    out: list[tuple[str, Want, Block]] = []
    for name, want in wants.items():
        if name == "return":
            continue
        blocks = {b.name: b for b in placed.blocks.get(name, [])}
        if not want.fields:
            if name in blocks:
                out.append((name, want, blocks[name]))
            continue
        for x, half in want.fields.items():
            whole = blocks.get(f"{name}.{x}")
            if whole is not None:
                out.append((whole.name, half, whole))
                continue
            layers = [b for label, b in blocks.items() if label.startswith(f"{name}.{x}[")]
            out += [(b.name, _layer(half, i), b) for i, b in enumerate(layers)]
    return out


def _layer(want: Want, i: int) -> Want:
    candidates = tuple(type(c)(c.value[i], None if c.slack is None else c.slack[i]) for c in want.candidates)
    return Want(want.named[i], candidates)


def _note(room: dict[str, float], got: Tensor, want: Want) -> None:
    if got.dtype.is_floating_point and any(c.slack is not None for c in want.candidates):
        name = SHORT[got.dtype]
        room[name] = max(room.get(name, 0.0), headroom(got, want))


def _results(label: str, got: Tensor, want: Want, before: Tensor | None, truths: Mapping[str, Want]) -> list[str]:
    right = right_any(got, want)
    if bool(right.all()):
        return []
    wrong = ~right
    at = tuple(int(i) for i in wrong.nonzero()[0])
    choices = sorted({_show(c.value[at]) for c in want.candidates})[:3]
    hints = []
    if before is not None and bool(same_bits(got, before)[wrong].all()):
        hints.append("never written: what was there before the call still is")
    for other, truth in truths.items():
        if (
            other != label
            and truth.named.shape == want.named.shape
            and bool(truth.named.any())
            and all((c.slack is None) or c.value.dtype == torch.float64 for c in truth.candidates)
            and _right_as(got, truth, wrong)
        ):
            hints.append(f"they are what {other} should hold")
    if got.ndim and got.shape[0] > 1:
        for by in (1, -1):
            if bool(want.named.any()) and bool(right_any(got.roll(by, 0), want).all()):
                hints.append("everything is one row off")
    if any(c.slack is not None for c in want.candidates):
        times = headroom(torch.where(wrong, got.float(), torch.nan).to(got.dtype), want)
        if times > 1:
            hints.append(f"up to {times:.3g} times the allowed error")
    text = (
        f"{label}{list(at)}: expected {' or '.join(choices)}, got {_show(got[at])}; "
        f"{int(wrong.sum())} of {int(want.named.sum())} named elements are wrong"
    )
    return [text + (f" ({', '.join(hints)})" if hints else "")]


def _right_as(got: Tensor, truth: Want, where: Tensor) -> bool:
    try:
        ok = right_any(got, truth)
    except TypeError:
        return False
    both = where & truth.named
    return bool(both.any()) and bool(ok[both].all())


def _show(x: Tensor) -> str:
    return (
        f"{float(x.float() if x.dtype.is_floating_point else x.long()):.9g}"
        if (x.dtype.is_floating_point)
        else str(int(x))
    )


def _judge_return(
    wants: Mapping[str, Want], placed: Placed, ret: Ret, device: str, room: dict[str, float]
) -> list[str]:
    want = wants.get("return")
    if want is None:
        return [] if ret.kind == "none" else [f"return: expected None, got {ret.type}"]
    if ret.kind != "tensor":
        return [f"return: expected a tensor, got {ret.type}"]
    same = next((n for n, w in wants.items() if n != "return" and w is want), None)
    if same is not None:
        return [] if same in ret.names else [f"return: expected {same} itself, got another tensor {ret.shown}"]
    if ret.device != device:
        return [f"return: expected a tensor on {device}, got one on {ret.device}"]
    dtype, shape = want.dtype or want.candidates[0].value.dtype, want.named.shape
    if (ret.dtype, ret.shape) != (SHORT[dtype], tuple(shape)):
        return [f"return: expected {SHORT[dtype]}{list(shape)}, got {ret.shown}"]
    if ret.values is None:
        return [f"return: {ret.shown}, and no bytes of it"]
    _note(room, ret.values, want)
    return _results("return", ret.values, want, None, {})
