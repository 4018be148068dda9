"""The lowered lane catches what it must; Triton's interpreter, on the same kernels and inputs, doesn't."""

from __future__ import annotations

import os

import pytest
import torch
from ascend import children, sabotage

from hal import lowered

I32 = torch.int32


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def inputs() -> dict[str, tuple]:
    """Kernel -> (grid, arguments, constexprs, index of the output, what a correct run leaves there)."""
    table = torch.arange(32, dtype=I32).view(4, 8)
    keep = ints(*[1, 0, 0] * 13)[:37]
    src = torch.arange(100, 137, dtype=I32)
    old = torch.full((37,), 7, dtype=I32)
    block = src[:16].clone()
    rows, lens, out3 = ints(0, 1, 2), ints(0, 3, 8), ints(0, 0, 0)
    need, pages, out6 = ints(1, 0, 1, 1, 0, 0, 0, 1, 1, 2, 3, 3), ints(5, 6, 7), ints(0, 0, 0, 0, 0, 0)
    b16 = {"BLOCK": 16}
    return {
        "last_loc_masked": ((1,), (table, rows, lens, out3, 3, 8), b16, 3, ints(-1, 10, 23)),
        "copy_where": ((3,), (src, keep, old.clone(), 37), b16, 2, torch.where(keep > 0, src, 0)),
        "store_where": ((3,), (src, keep, old.clone(), 37), b16, 2, torch.where(keep > 0, src, old)),
        "odd_or_even": ((2,), (block, old[:16].clone(), 16), b16, 1, block),
        "take_pages": ((1,), (pages, need, out6, 6, 3), {"BLOCK": 8}, 2, ints(5, -1, 6, 7, -1, -1)),
    }


CAUGHT = {
    "last_loc_masked": (lowered.AccessError, "table", -4),
    "copy_where": (lowered.AccessError, "src", 44),
    "store_where": (lowered.AccessError, "dst", 44),
    "odd_or_even": (lowered.RaceError, "dst", None),
    "take_pages": (lowered.AccessError, "free_pages", 4),
}


@pytest.mark.parametrize("name", sorted(CAUGHT))
def test_lowering_shows_what_the_mask_hides(name: str) -> None:
    grid, args, constexprs, _, _ = inputs()[name]
    kind, argument, distance = CAUGHT[name]
    with pytest.raises(kind) as caught:
        getattr(sabotage, name)(grid, *args, **constexprs)
    assert (caught.value.kernel, caught.value.argument) == (name, argument)
    if distance is not None:
        assert caught.value.distance == distance
    assert name in str(caught.value)
    assert argument in str(caught.value)


@pytest.mark.parametrize("name", sorted(CAUGHT))
def test_nothing_outside_was_touched(name: str) -> None:
    """Every tensor lies in the middle of a larger one whose rest must not change."""
    grid, args, constexprs, _, _ = inputs()[name]
    zones, placed = [], []
    for a in args:
        if isinstance(a, torch.Tensor):
            zone = torch.full((a.numel() + 128,), 0x5A5A5A5A, dtype=I32)
            zone[64:-64] = a.reshape(-1)
            zones.append(zone)
            a = zone[64:-64].view(a.shape)
        placed.append(a)
    with pytest.raises(lowered.LoweredError):
        getattr(sabotage, name)(grid, *placed, **constexprs)
    for zone in zones:
        assert bool((zone[:64] == 0x5A5A5A5A).all())
        assert bool((zone[-64:] == 0x5A5A5A5A).all())


def test_an_honest_bug_is_named() -> None:
    src = torch.arange(37, dtype=I32)
    with pytest.raises(lowered.AccessError) as caught:
        sabotage.off_by_one((4,), src, src.clone(), 37, BLOCK=16)
    # The last element is the 36th, program 36 % 4.
    assert (caught.value.program, caught.value.kind, caught.value.distance) == ((0, 0, 0), "read", 4)


def test_a_write_after_a_write_is_a_race() -> None:
    src = torch.arange(37, dtype=I32)
    with pytest.raises(lowered.RaceError) as caught:
        sabotage.overlapping((3,), src, src.clone(), 37, BLOCK=16)
    assert (caught.value.argument, caught.value.program, caught.value.other) == ("dst", (1, 0, 0), (0, 0, 0))
    assert caught.value.offset == 60


def test_shared_writes_excuse_two_writes_and_nothing_else() -> None:
    src = torch.arange(37, dtype=I32)
    dst = torch.zeros_like(src)
    sabotage.overlapping_declared((3,), src, dst, 37, BLOCK=16)
    assert torch.equal(dst, src)
    with pytest.raises(lowered.RaceError, match="would read"):
        sabotage.read_after_shared((3,), src, torch.zeros_like(src), 37, BLOCK=16)


def test_a_gap_between_rows_is_not_the_tensor() -> None:
    wide = torch.zeros(4, 16, dtype=I32)
    view = wide[:, :8]
    sabotage.fill_rows((4,), view, 16, 8, BLOCK=8)
    assert bool((wide[:, :8] == 1).all())
    assert bool((wide[:, 8:] == 0).all())
    with pytest.raises(lowered.AccessError, match="between the rows") as caught:
        sabotage.fill_rows((4,), view, 16, 9, BLOCK=16)
    assert caught.value.distance == 0
    assert bool((wide[:, 8:] == 0).all())


def test_views_of_one_tensor_race_with_each_other() -> None:
    both = torch.arange(40, dtype=I32)
    with pytest.raises(lowered.RaceError):
        sabotage.copy_block((2,), both[:32], both[8:], 16, BLOCK=16)


def test_a_grid_that_cann_refuses() -> None:
    src = torch.arange(37, dtype=I32)
    with pytest.raises(lowered.LoweredError, match="65535"):
        sabotage.overlapping((70000,), src, src.clone(), 37, BLOCK=16)


def test_what_only_the_device_has_is_an_error() -> None:
    src = torch.arange(16, dtype=I32)
    with pytest.raises(lowered.LoweredError):
        sabotage.scan((1,), src, src.clone(), BLOCK=16)


INTERPRETED = """
import sys, torch, triton
from ascend import sabotage
from ascend.test_sabotage import inputs
for name, (grid, args, constexprs, out, want) in inputs().items():
    getattr(sabotage, name).jit[grid](*args, **constexprs)
    assert torch.equal(args[out], want), (name, args[out], want)
    print(name)
"""


def test_the_interpreter_passes_them_all() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}
    ran = children.run(INTERPRETED, {**env, "TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == list(inputs())
