"""The memory that a backend is judged in: what is written outside of what a contract names is seen, and placed."""

from __future__ import annotations

import os

import pytest
import torch
from conformance.child import ROOT, run

from hal.conformance._arena import POISONS, Arena, Room, place
from hal.conformance._block import ZONE, extent
from hal.conformance._truths import pure_outputs
from hal.kv.pool import KVPool
from hal.ops import get_spec

ROOM = Room(Arena())


def odd_view() -> torch.Tensor:
    return torch.arange(40, dtype=torch.int32)[1:].as_strided((3, 4), (12, 1))


@pytest.mark.parametrize("poison", POISONS)
def test_a_placed_tensor_has_the_same_elements_strides_and_alignment(poison: int) -> None:
    t = odd_view()
    placed = place({"t": t}, ROOM, poison=poison)
    got = placed.values["t"]
    assert torch.equal(got, t)
    assert got.stride() == t.stride()
    assert got.data_ptr() % 16 == t.data_ptr() % 16
    assert got.data_ptr() != t.data_ptr()
    moved = place({"t": t}, ROOM, shift=1).values["t"]
    assert moved.data_ptr() % 16 == (t.data_ptr() + 4) % 16


@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (-1, "4 bytes before it"),
        (28, "0 bytes past the end of it"),
        (5, "gaps"),
        (ZONE // 4 + 27, "4092 bytes past"),
        (-1024, "4096 bytes before"),
    ],
)
def test_a_stray_write_is_seen_and_placed(offset: int, where: str) -> None:
    placed = place({"t": odd_view()}, ROOM)
    t = placed.values["t"]
    t.as_strided((1,), (1,), t.storage_offset() + offset).fill_(12345)
    (block,) = placed.all()
    changed = block.changes(torch.ones(3, 4, dtype=torch.bool))
    assert changed is not None
    assert where in changed


def test_only_named_elements_may_change() -> None:
    placed = place({"t": odd_view()}, ROOM)
    placed.values["t"][1, 2] = -5
    (block,) = placed.all()
    named = torch.zeros(3, 4, dtype=torch.bool)
    assert block.changes(named) == "t[1, 2]: changed, though the contract does not name it (4 bytes in all)"
    assert block.changes(None) is not None
    named[1, 2] = True
    assert block.changes(named) is None


def test_far_rows_are_watched_around_each_row() -> None:
    t = torch.empty_strided((4, 5), (2**29, 1), dtype=torch.int32).copy_(torch.arange(20).view(4, 5))
    placed = place({"t": t}, ROOM)
    got, (block,) = placed.values["t"], placed.all()
    assert torch.equal(got, t)
    assert block.changes(None) is None
    got.as_strided((1,), (1,), got.storage_offset() + 3 * 2**29 + 5).fill_(1)
    assert "past the end of row 3" in (block.changes(torch.ones(4, 5, dtype=torch.bool)) or "")


def test_what_a_row_may_write_is_not_outside_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.conformance._block.FAR_BYTES", 0)
    placed = place({"t": torch.arange(20).view(4, 5)}, ROOM)
    (block,) = placed.all()
    placed.values["t"][1:3] = -1
    named = torch.zeros(4, 5, dtype=torch.bool)
    named[1:3] = True
    assert block.changes(named) is None
    named[2, 0] = False
    assert "t[2, 0]: changed" in (block.changes(named) or "")


def test_outputs_hold_the_poison() -> None:
    placed = place({"t": odd_view()}, ROOM, poison=0x5A, outputs=frozenset({"t"}))
    assert (placed.values["t"] == 0x5A5A5A5A).all()


@pytest.mark.parametrize("side", ["start", "end"])
def test_guard_pages_hold_the_tensor(side: str) -> None:
    t = odd_view()
    got = place({"t": t}, Room(Arena(), side=side)).values["t"]
    assert torch.equal(got, t)
    at = got.data_ptr() if side == "start" else got.data_ptr() + extent(t) * 4
    assert at % os.sysconf("SC_PAGE_SIZE") == 0


def test_a_touched_guard_page_ends_the_process() -> None:
    code = (
        "import torch, ctypes\nfrom hal.conformance._arena import *\nfrom hal._remote.memory import Placed as Given\n"
        "arena = Arena()\nplaced = place({'t': torch.zeros(5)}, Room(arena, side='end'))\n"
        "given = Given(arena.memory, placed.arguments, torch.device('cpu'))\nt = given.values['t']\n"
        "byte = ctypes.c_byte.from_address(t.data_ptr() + 20)\nbyte.value\n"
        "with given.guard_pages():\n    print('guarded', flush=True)\n    byte.value\n"
    )
    got = run(["-c", code], ROOT)
    assert (got.stdout, got.returncode) == ("guarded\n", -11)


def test_pools_are_placed_half_by_half() -> None:
    a = get_spec("kv_transfer").make(dst="list")
    placed = place(a, ROOM)
    assert isinstance(placed.values["dst"], KVPool)
    assert [b.name for b in placed.blocks["dst"]] == [f"dst.{x}[{i}]" for x in "kv" for i in range(3)]
    assert placed.values["dst"].layout == "layer_first"


def test_a_tensor_that_is_a_part_of_another_stays_one() -> None:
    k = torch.randn(4, 2, 6)
    arguments = {"k": k, "v": k[..., :4], "w": k[..., 2:], "x": k.clone()}
    placed = place(arguments, ROOM, shift=1)
    assert placed.values["v"].data_ptr() == placed.values["k"].data_ptr()
    assert all(torch.equal(placed.values[name], t) for name, t in arguments.items())
    assert list(placed.blocks) == ["k", "w", "x"]
    apart = place(arguments, ROOM, apart=frozenset({"v"}))
    assert apart.values["v"].data_ptr() != apart.values["k"].data_ptr()


def test_pure_outputs_are_found_by_changing_them() -> None:
    assert pure_outputs(get_spec("assign_extend_cache_locs")) == {"out"}
    assert pure_outputs(get_spec("rope_kv_write")) == {"k_cache", "v_cache"}
    assert pure_outputs(get_spec("kv_transfer")) == {"dst"}
    assert pure_outputs(get_spec("get_last_loc")) == set()
