# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""compute_positions: prefix_i, ..., seq_i - 1 of every request, one after the other, in one flat tensor.

The requests are shared out as `_spans` says; the last group's programs also fill what is left of `out`.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal import launch
from hal.backends.cuda._device import pdl
from hal.backends.cuda._spans import BLOCK, GROUP, TILE, WARPS, extents, grid, owners


@launch.jit(do_not_specialize=("prefixes", "lens", "out", "indptr", "bs", "size", "each", "parts"))
def positions_kernel(
    prefixes, lens, out, indptr, bs: tl.int64, size: tl.int64, each: tl.int32, parts: tl.int32,
    PDL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) // parts).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) % parts).to(tl.int64)
    total = tl.zeros([], tl.int64)
    for at in range(0, first, TILE):
        prefix, seq = extents(prefixes, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), True)
        total += tl.sum(seq - prefix, 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        j = group + tl.arange(0, GROUP)
        prefix, seq = extents(prefixes, lens, j, bs, True)
        ending = tl.cumsum(seq - prefix, 0)
        if indptr is not None:  # noqa: SIM102 (known when compiled; the other is not)
            if part == 0:
                sums = tl.minimum(total + ending, size)
                tl.store(indptr + j + 1, sums.to(indptr.dtype.element_ty), j < bs)
        stop = tl.minimum(tl.sum(seq - prefix, 0), size - total)
        for low in range(part * BLOCK, stop, parts * BLOCK):
            behind, t = owners(ending, low, BLOCK)
            o = low + tl.arange(0, BLOCK)
            start = tl.load(prefixes + group + behind, o < stop, other=0).to(tl.int64)
            tl.store(out + total + o, (start + t).to(out.dtype.element_ty), o < stop)
        total += tl.sum(seq - prefix, 0)
    if indptr is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))
    if first + each * GROUP >= bs:
        for low in range(total + part * BLOCK, size, parts * BLOCK):
            o = low + tl.arange(0, BLOCK)
            tl.store(out + o, tl.full([BLOCK], -1, out.dtype.element_ty), o < size)


class _Launches(dict[int, launch.Launch]):
    def __missing__(self, device: int) -> launch.Launch:
        on = pdl(device)
        self[device] = positions_kernel.bind(
            PDL=on, BLOCK=BLOCK, GROUP=GROUP, TILE=TILE, num_warps=WARPS, launch_pdl=on
        )
        return self[device]


_launches: _Launches = launch.keeps(_Launches())


def compute_positions(
    prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None
) -> Tensor:
    bs, size = prefix_lens.numel(), out.numel()
    if size or indptr is not None:
        device = out.get_device()
        programs, each, parts = grid(bs, size, device)
        _launches[device].start(programs, prefix_lens, seq_lens, out, indptr, bs, size, each, parts)
    return out


def supports(sig: object) -> None:
    """Every call of the contract."""
