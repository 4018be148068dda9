"""What the tests of the CPU backend share: an op's samples, judged; tensors between guard pages."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops.kv_transfer import stacked
from hal.ops.proofs.judge import Want, headroom, right_any, same_bits

OPS = ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer")


def ours(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"hal.backends.cpu.{op}"), op)


def samples(large: bool = False) -> list[tuple[str, str]]:
    return [(op, s.name) for op in OPS for s in get_spec(op).samples if large or not s.large]


def make(op: str, sample: str) -> dict[str, Any]:
    return get_spec(op).make(**next(s.params for s in get_spec(op).samples if s.name == sample))


def judge(op: str, call: Callable[[dict[str, Any]], Any], make_args: Callable[[], dict[str, Any]]) -> None:
    """Runs `call` on fresh arguments: named elements right within the bound, all others as they were."""
    s = get_spec(op)
    args, before = make_args(), make_args()
    want = s.oracle(before)
    result = call(args)
    for name, w in want.items():
        got = result if name == "return" else args[name]
        if name == "return" and name not in s.mutated and args.get("out") is not None:
            assert result is args["out"]
        for half, one in (w.fields or {"": w}).items():
            a = stacked(getattr(got, half)) if half else got
            b = None if name == "return" else stacked(getattr(before[name], half)) if half else before[name]
            _right(f"{name}.{half}", a, b, one)
    for name, value in before.items():
        if isinstance(value, Tensor) and name not in s.mutated:
            assert bool(same_bits(value, args[name]).all()), f"{name} was written"


def _right(name: str, got: Tensor, was: Tensor | None, want: Want) -> None:
    ok = right_any(got, want)
    assert bool(ok.all()), f"{name}: {int((~ok).sum())} of {ok.numel()} elements are wrong"
    assert headroom(got, want) <= 1.0, name
    if was is not None:
        assert bool((same_bits(got, was) | want.named).all()), (
            f"{name}: what the contract does not name was written"
        )


# --- guard pages ------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_NONE, _READ = 0, 1


def _protect(address: int, size: int, how: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(t: Tensor, right: bool, read_only: bool, keep: list[Any]) -> Tensor:
    """A copy of `t`, same strides, its first or last byte beside a page that kills whoever touches it."""
    reach = sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    size = reach * t.itemsize
    inner = -(-size // _PAGE) * _PAGE
    area = mmap.mmap(-1, inner + 2 * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    _protect(start, _PAGE, _NONE)
    _protect(start + _PAGE + inner, _PAGE, _NONE)
    keep.append(area)
    at = start + _PAGE + (inner - size if right else 0)
    if not reach:
        return t
    flat = torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.uint8).view(t.dtype)
    out = flat.as_strided(t.shape, t.stride())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    out.view(bits).copy_(t.view(bits))
    if read_only:
        _protect(start + _PAGE, inner, _READ)
    return out


def guarded_args(op: str, args: dict[str, Any], right: bool, keep: list[Any]) -> dict[str, Any]:
    """All tensors of a call between guard pages; those that the op may not write are read-only as well."""
    mutated = get_spec(op).mutated

    def guard(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return guarded(value, right, name not in mutated, keep)
        if isinstance(value, KVPool):
            halves = [
                [guard(name, t) for t in h] if isinstance(h, tuple) else None if h is None else guard(name, h)
                for h in (value.k, value.v)
            ]
            return KVPool(halves[0], halves[1], layout=value.layout, page_size=value.page_size)
        return value

    return {name: guard(name, value) for name, value in args.items()}
