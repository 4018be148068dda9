"""Parts of query tokens, merged by tile, beside a merge by torch. Under TRITON_INTERPRET=1.

The kernel that leaves such parts runs on Hopper alone, so they are made up here.
"""

import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from hal.backends.cuda._merge import merge_kernel

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1"
)
HEADS, PROGRAMS = 3, 28
TILES = ((1, 0), (4, 5), (2, 1), (3, 9), (1, 2), (4, 4), (2, 0), (3, 1), (1, 3), *[(1, 0)] * 16)
"""(tokens, parts): of no part where the tokens are no request's, of one where the kernel before has written them."""


def expected(part: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[parts, heads, DV]`` and ``[parts, heads]``, log-sum-exps of base 2."""
    weights = torch.exp2(sums - sums.amax(0).clamp(min=-1e30))
    total = weights.sum(0)
    out = (part * weights[..., None]).sum(0) / total.clamp(min=1e-30)[..., None]
    return out, torch.logsumexp(sums * math.log(2), 0)


@pytest.mark.parametrize(("requests", "unit"), [(1, 1), (4, 8)])
@pytest.mark.parametrize(
    ("tokens", "dv", "piece", "apart", "halves", "paired"),
    [
        (4, 16, 16, 1, False, False),
        (3, 40, 64, 2, False, False),
        (4, 40, 16, 30, False, False),
        (1, 40, 16, 1, False, False),
        (0, 40, 16, 2, False, False),
        (0, 64, 32, 1, True, True),
        (3, 64, 32, 2, True, True),
        (2, 64, 32, 1, True, False),
        (0, 64, 32, 2, False, True),
    ],
    ids=str,
)
def test_right(
    tokens: int, dv: int, piece: int, apart: int, halves: bool, paired: bool, requests: int, unit: int
) -> None:
    """Every so manieth token is a program's: more than it looks at together, a few, or one of a tile of several. Of
    `tokens` 0 each is a request, whose parts are one behind the other."""
    rng = torch.Generator().manual_seed(tokens)
    many, between, note = max(tokens, 1), 2 if tokens else 1, 4 if tokens else 2
    tiles = [(min(rows, many), parts) for rows, parts in TILES]
    n, lines = sum(rows for rows, _ in tiles), HEADS * many
    # What no part has is NaN, so that it shows where it is read.
    part = torch.full((n + PROGRAMS, many, HEADS, dv), torch.nan)
    told = torch.full((1 + (n + PROGRAMS) * lines + note * n,), torch.nan)
    scratch = told[1:]
    sums = scratch[: (n + PROGRAMS) * lines].view(n + PROGRAMS, many, HEADS)
    notes = scratch[(n + PROGRAMS) * lines :].view(torch.int32).view(n, note)
    told.view(torch.int32)[0] = 1
    units = torch.exp2(torch.randint(-20, 20, (*part.shape[:-1], 2), generator=rng))  # of two groups' columns
    out, lse = torch.full((n, HEADS, dv), torch.nan), torch.full((n, HEADS), torch.nan)
    want, want_lse = out.clone(), lse.clone()
    before = t = 0
    for rows, parts in tiles:
        for row in range(rows):
            notes[t + row] = torch.tensor([parts, before, between, row][:note])
        some = slice(before, before + parts * between, between)
        x = torch.randn(parts, rows, HEADS, dv, generator=rng)
        part[some, :rows] = x.half() * units[some, :rows].repeat_interleave(dv // 2, -1) if halves else x
        sums[some, :rows] = 20 * torch.randn(parts, rows, HEADS, generator=rng)
        sums[some, :rows][1::3] = -torch.inf
        sums[some, rows - 1, 0] = -torch.inf
        if parts > 1:
            for row in range(rows):
                want[t + row], want_lse[t + row] = expected(part[some, row], sums[some, row])
        before, t = before + parts * between, t + rows
    assert before <= n + PROGRAMS
    if paired:  # as `wgmma` leaves a row: columns 0 1, 8 9 (of halves 16 17 and 24 25 too) side by side, then 2 3
        part = part.unflatten(-1, (-1, 4 if halves else 2, 4, 2)).transpose(-3, -2).flatten(-4).contiguous()
    if halves:
        lines = torch.full_like(part, torch.nan)
        lines.view(torch.float16)[..., :dv] = part / units.repeat_interleave(dv // 2, -1)
        lines[..., dv // 2 : dv // 2 + 2] = units
        part = lines
    form = {"PIECE": piece, "ROWS": 4, "REQUESTS": requests, "HALVES": halves, "PAIRED": paired, "EARLY": halves}
    form["TOLD"] = not tokens
    run = merge_kernel.bind(Q_HEADS=HEADS, TOKENS=tokens, DV=dv, LSE=True, UNIT=unit, PDL=False, **form)
    grid = (apart * HEADS * -(-dv // piece), 1, 1)
    run.start(grid, part, scratch, out, lse, HEADS * dv // unit, dv // unit, n, PROGRAMS)
    torch.testing.assert_close(out, want, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, equal_nan=True)
    assert bool((lse == -torch.inf).any())
    assert bool(out.isnan().any())
    if not tokens:  # told that there is nothing to merge, only one program looks
        told.view(torch.int32)[0] = 0
        again, again_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        run.start(grid, part, scratch, again, again_lse, HEADS * dv // unit, dv // unit, n, PROGRAMS)
        assert bool(again[:, 1:].isnan().all() & again_lse[:, 1:].isnan().all())
