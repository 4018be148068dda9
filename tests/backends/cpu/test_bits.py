"""The conversions, against torch's: every bit pattern that can be read, and every boundary that can be rounded at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.backends.cpu._bits import HALF, load, store
from hal.backends.cpu._jit import Kernel


def _convert(n, x, y):  # type: ignore[no-untyped-def]
    for i in range(n):
        store(y, i, load(x, i))


convert = Kernel(_convert, "int *x *y")
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16_bits": torch.float16}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _run(x: torch.Tensor, source: str, kind: str, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    convert(source, kind)(x.numel(), x.data_ptr(), out.data_ptr())
    return out


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    a, b = got.float(), want.float()
    ok = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    bad = (~ok).nonzero().flatten()[:5].tolist()
    assert not bad, [(i, float(a[i]), float(b[i])) for i in bad]


def hard() -> torch.Tensor:
    """fp32 values at, next to and between all numbers of the 8- and 16-bit formats, both signs, and odd ones."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    exact = torch.cat([halves.view(torch.float16).float(), halves.view(torch.bfloat16).float()])
    exact = exact[exact.isfinite()].unique()
    middle = (exact[1:].double() + exact[:-1].double()).div(2).float()
    near = torch.cat([exact, middle])
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45])
    payloads = torch.tensor([0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    up, down = (torch.nextafter(near, torch.tensor(s * torch.inf)) for s in (1, -1))
    return torch.cat([near, up, down, random.view(torch.float32), odd, payloads])


@pytest.mark.parametrize("kind", FLOATS)
def test_reads_every_pattern(kind: str) -> None:
    if kind == "fp16" and HALF != "fp16":
        pytest.skip("this CPU does not convert fp16 itself")
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(FLOATS[kind])
    _same(_run(x, kind, "fp32", torch.float32), x.float())


@pytest.mark.parametrize("kind", FLOATS)
def test_rounds_to_nearest_even(kind: str) -> None:
    if kind == "fp16" and HALF != "fp16":
        pytest.skip("this CPU does not convert fp16 itself")
    x = hard()
    _same(_run(x, "fp32", kind, FLOATS[kind]), x.to(FLOATS[kind]))


@pytest.mark.parametrize("kind", FP8)
def test_fp8_rounds_and_saturates(kind: str) -> None:
    x = hard()
    top = torch.finfo(FP8[kind]).max
    got = _run(x, "fp32", kind, FP8[kind])
    _same(got, x.clamp(-top, top).to(FP8[kind]))
    assert float(got.float()[x == torch.inf].min()) == top
    assert bool(got.float()[x.isnan()].isnan().all())


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("kind", [*FLOATS, "fp32"])
def test_a_vector_rounds_as_an_element_does(kind: str, lanes: int) -> None:
    """_rotate's blocks use vectors: rotating by cos 1, sin 0 is the conversion alone, for 16 pairs or for 1."""
    if kind == "fp16" and HALF != "fp16":
        pytest.skip("this CPU does not convert fp16 itself")
    from hal.backends.cpu.rope_kv_write import _rotate

    dtype = {**FLOATS, "fp32": torch.float32}[kind]
    x = hard()
    x = torch.where(x.isfinite(), x, 1.0)  # Inf * 0 is NaN by right
    x = x[: x.numel() // (2 * lanes) * 2 * lanes].view(-1, 2 * lanes)
    turn: Any = Kernel(_turns(_rotate), "int int fp32 *y fp32 fp32 bool")
    cos, sin = torch.ones(lanes), torch.zeros(lanes)
    for interleaved in (False, True):
        out = torch.empty(x.shape, dtype=dtype)
        turn(kind)(x.shape[0], lanes, x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), interleaved)
        got, want = out.flatten(), x.flatten().to(dtype)
        zero = want == 0  # -0 + 0 is 0
        _same(got[~zero], want[~zero])
        assert bool((got[zero] == 0).all())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", FLOATS)
def test_rotation_rounds_to_nearest_even(kind: str, interleaved: bool) -> None:
    """Pairs (1, 0) turned by (cos, sin) are (cos, sin): every hard value is rounded by the code that rotates."""
    from hal.backends.cpu.rope_kv_write import rope_kv_write

    x = hard()
    x = x[: x.numel() // 64 * 64].view(-1, 64)
    for half in (0, 1):
        cos_sin = torch.zeros(x.shape[0], 128)
        cos_sin[:, 64 * half : 64 * half + 64] = x
        q = torch.zeros(x.shape[0], 1, 128, dtype=FLOATS[kind])
        q[..., slice(0, 128, 2) if interleaved else slice(0, 64)] = 1
        rope_kv_write(q, q[:, :0], None, cos_sin, torch.arange(x.shape[0]), interleaved=interleaved)
        got = q[:, 0, half::2] if interleaved else q[:, 0, 64 * half : 64 * half + 64]
        want = x.to(FLOATS[kind])
        real = ~(want == 0)  # 0 - 0 is 0, whatever the sign
        _same(got[real], want[real])
        assert bool((got[~real] == 0).all())


def _turns(rotate):  # type: ignore[no-untyped-def]
    from hal.backends.cpu._bits import shift

    def turns(n, half, x, y, cos, sin, interleaved):  # type: ignore[no-untyped-def]
        for i in range(n):
            at = i * 2 * half
            rotate(shift(x, at), shift(y, at), cos, sin, cos, half, interleaved)

    return turns
