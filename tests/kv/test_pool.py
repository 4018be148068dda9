"""KVPool: what it accepts, where it says that bytes are, host pools; the allocator of slots."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

import hal
from hal import KVPool, SlotAllocator
from hal.kv.pool import LAYOUTS
from hal.ops.kv_transfer import stack_layers
from hal.ops.proofs.kv_transfer import make as _make

KINDS = ("layer_first", "list", "page_first", "page_first_direct", "page_head")


def pool(layout: str, view: str = "plain", page: int = 4, mla: bool = False, dtype: str = "bf16") -> KVPool:
    args = _make(
        dst=layout, dst_page=page, dst_slots=6 * page, view=view, mla=mla, dtype=dtype, v_head_dim=None if mla else 24
    )
    made: KVPool = args["dst"]
    return made


@pytest.mark.parametrize("dtype", ["u8", "bf16", "e4m3"])
@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("view", ["plain", "padded"])
@pytest.mark.parametrize("layout", KINDS)
def test_bytes_are_where_planes_say(layout: str, view: str, mla: bool, dtype: str) -> None:
    """Reads each row through the addresses alone, and through `layer`."""
    p = pool(layout, view, mla=mla, dtype=dtype)
    assert len(p.planes()) == (1 if mla else 2)
    for which, plane in enumerate(p.planes()):
        assert len(plane.bases) == p.num_layers
        row_shape = (p.row_shape, p.v_row_shape)[which]
        assert row_shape is not None
        assert plane.row_bytes == torch.Size(row_shape).numel() * p.dtype.itemsize
        for layer in range(p.num_layers):
            half = p.layer(layer)[which]
            assert half is not None
            flat = half.reshape(p.num_slots, *row_shape) if half.ndim > len(row_shape) + 1 else half
            for slot in range(p.num_slots):
                page, token = divmod(slot, p.page_size)
                start = plane.bases[layer] + page * plane.page_stride + token * plane.token_stride
                got = b"".join(
                    ctypes.string_at(start + c * plane.chunk_stride, plane.chunk_bytes) for c in range(plane.chunks)
                )
                assert got == bytes(flat[slot].contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("layout", KINDS)
def test_layer_is_a_view_by_the_layout(layout: str) -> None:
    p = pool(layout)
    k, v = p.layer(1)
    whole = stack_layers(p.k)
    where = {
        "layer_first": lambda: whole[1],
        "list": lambda: whole[1],
        "page_first": lambda: whole[:, 1],
        "page_first_direct": lambda: whole[:, 1],
        "page_head": lambda: whole[:, :, :, 1].transpose(1, 2),
    }
    assert torch.equal(k.view(torch.int16), where[layout]().view(torch.int16))
    owner = p.k[1] if isinstance(p.k, tuple) else p.k
    assert k.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
    assert v is not None
    assert pool(layout, mla=True).layer(0)[1] is None


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("source", KINDS)
def test_host_like(source: str, layout: str, mla: bool) -> None:
    p = pool(source, mla=mla, dtype="e4m3")
    if layout == "page_head" and len(p.row_shape) != 2:
        with pytest.raises(hal.ArgumentError, match="layout: expected a layout without a head dim"):
            KVPool.host_like(p, 16, layout)
        return
    host = KVPool.host_like(p, 16, layout)
    assert (host.layout, host.num_slots, host.page_size, host.device.type) == (layout, 16, p.page_size, "cpu")
    assert (host.num_layers, host.row_shape, host.v_row_shape, host.dtype) == (
        p.num_layers,
        p.row_shape,
        p.v_row_shape,
        p.dtype,
    )
    assert host.pinned == torch.cuda.is_available()
    assert not stack_layers(host.k).view(torch.uint8).any()
    assert KVPool.host_like(p, 0, layout).num_slots == 0
    assert KVPool.host_like(p, 6, layout, page_size=3).page_size == 3


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"slots": 7}, "slots"),
        ({"slots": -4}, "slots"),
        ({"slots": True}, "slots"),
        ({"slots": 4.0}, "slots"),
        ({"page_size": 0}, "page_size"),
        ({"layout": "row_first"}, "layout"),
        ({"layout": ["page_first"]}, "layout"),
    ],
)
def test_host_like_refuses(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(hal.ArgumentError) as e:
        KVPool.host_like(pool("layer_first"), **{"slots": 16, **change})
    assert e.value.argument == argument


def z(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("args", "argument", "said"),
    [
        ({"k": z(2, 8, 4), "layout": "rows"}, "layout", "one of layer_first"),
        ({"k": z(2, 8, 4), "layout": None}, "layout", "one of layer_first"),
        ({"k": z(2, 8, 4), "layout": {}}, "layout", "one of layer_first"),
        ({"k": z(2, 8, 4), "page_size": 0}, "page_size", "an int >= 1"),
        ({"k": z(2, 8, 4), "page_size": True}, "page_size", "an int >= 1"),
        ({"k": z(2, 8, 4), "page_size": 2.0}, "page_size", "an int >= 1"),
        ({"k": None}, "k", "a tensor or a sequence of tensors; got NoneType"),
        ({"k": 3}, "k", "a tensor or a sequence of tensors; got int"),
        ({"k": z(2, 8, 4), "v": 3}, "v", "a tensor or a sequence of tensors; got int"),
        ({"k": []}, "k", "non-empty"),
        ({"k": [z(8, 4), 3]}, "k", r"got \(Tensor, int\)"),
        ({"k": [z(8, 4), z(9, 4)]}, "k[1]", r"layer 0's float32\[8, 4\]"),
        ({"k": [z(8, 4), z(8, 4).half()]}, "k[1]", "layer 0's"),
        ({"k": [z(8, 4), z(8, 8)[:, :4]]}, "k[1]", "layer 0's"),
        ({"k": [z(8, 2, 4)], "layout": "page_first"}, "k", r"one tensor \[S, L"),
        ({"k": z(8, 4)}, "k", r"got \[8, 4\]"),
        ({"k": [z(8)]}, "k", r"got 1 x \[8\]"),
        ({"k": z(2, 8, 4), "layout": "page_head"}, "k", r"\[P, H, page_size, L, D\]"),
        ({"k": z(2, 8, 4, 8)[..., ::2]}, "k", "a contiguous token row"),
        ({"k": z(2, 8, 8, 4)[:, :, ::2]}, "k", "a contiguous token row"),
        ({"k": z(2, 3, 4, 5, 8)[..., ::2], "layout": "page_head", "page_size": 4}, "k", "a contiguous last dim"),
        ({"k": z(2, 1, 4).expand(2, 8, 4)}, "k", "no two elements in one place"),
        (
            {"k": z(3, 2, 4, 8), "layout": "page_first_direct", "page_size": 3},
            "page_size",
            "4, which the tensor's shape",
        ),
        ({"k": z(2, 8, 4), "v": z(3, 8, 4)}, "v", "k's shape but for the last dim"),
        ({"k": z(2, 8, 4), "v": z(2, 9, 4)}, "v", "k's shape but for the last dim"),
        ({"k": z(2, 8, 2, 4), "v": z(2, 8, 4, 4)}, "v", "k's shape but for the last dim"),
        ({"k": z(2, 8, 4), "v": z(2, 8, 4).half()}, "v", "torch.float32 on cpu, like k"),
        ({"k": z(2, 8, 4), "v": z(2, 8, 4).to("meta")}, "v", "in memory"),
    ],
)
def test_pool_refuses(args: dict[str, Any], argument: str, said: str) -> None:
    with pytest.raises(hal.ArgumentError, match=said) as e:
        KVPool(**args)
    assert (e.value.op, e.value.argument) == ("KVPool", argument)


def test_pool_describes_itself() -> None:
    assert repr(pool("list")) == "KVPool(k+v, layer_first, layers=3, slots=24, row=2x16, page_size=4, bfloat16@cpu)"
    assert "KVPool(k, page_first, " in repr(pool("page_first", mla=True))
    empty = KVPool(z(2, 0, 4))
    assert not empty.pinned
    assert empty.num_slots == 0


# --- the allocator ----------------------------------------------------------------------------------


class Allocations(RuleBasedStateMachine):
    """Against a set of free pages: no slot is handed out twice, none is lost, runs are as long as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.page, self.pages = 3, 11
        self.allocator = SlotAllocator(self.pages * self.page + 2, self.page)
        self.free = set(range(self.pages))
        self.held: list[Tensor] = []

    def runs(self) -> list[int]:
        lengths, n = [], 0
        for p in range(self.pages + 1):
            if p in self.free:
                n += 1
            elif n:
                lengths.append(n)
                n = 0
        return lengths

    @rule(tokens=st.integers(0, 40))
    def alloc(self, tokens: int) -> None:
        need = -(-tokens // self.page)
        if need > len(self.free):
            with pytest.raises(hal.HalError, match=f"{tokens} slots asked for, {len(self.free) * self.page} free"):
                self.allocator.alloc(tokens)
            return
        lengths = self.runs()
        slots = self.allocator.alloc(tokens)
        assert (slots.dtype, slots.device.type, slots.numel()) == (torch.int64, "cpu", tokens)
        got = slots.tolist()
        taken = list(dict.fromkeys(s // self.page for s in got))
        assert got == [p * self.page + i for p in taken for i in range(self.page)][:tokens]
        assert len(taken) == need
        assert set(taken) <= self.free
        if any(n >= need for n in lengths) and need:
            assert taken == list(range(taken[0], taken[0] + need)), "a run that holds it was free"
        self.free -= set(taken)
        if tokens:
            self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        cut = data.draw(st.integers(1, slots.numel()))
        rest, gone = slots[cut:], set((slots[:cut] // self.page).tolist())
        kept = rest[[s // self.page not in gone for s in rest.tolist()]] if rest.numel() else rest
        self.allocator.free(torch.cat([torch.tensor([-1]), slots[:cut].flip(0)]))
        self.free |= gone
        if kept.numel():
            self.held.append(kept)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_what_is_free(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.free)))
        both = torch.cat([*self.held[:1], torch.tensor([page * self.page])])
        with pytest.raises(hal.ArgumentError, match=f"page {page}, which is free already"):
            self.allocator.free(both)

    @rule(slot=st.sampled_from([-2, 33, 34, 2**40]))
    def free_what_is_outside(self, slot: int) -> None:
        with pytest.raises(hal.ArgumentError, match=r"slots in \[0, 33\)"):
            self.allocator.free(torch.tensor([slot]))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.allocator.available == len(self.free) * self.page


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("args", [(-1, 1), (4, 0), (4.0, 1), (4, True)])
def test_allocator_refuses(args: tuple[Any, Any]) -> None:
    with pytest.raises(hal.ArgumentError) as e:
        SlotAllocator(*args)
    assert e.value.op == "SlotAllocator"


@pytest.mark.parametrize("tokens", [-1, 1.5, True, None])
def test_alloc_refuses(tokens: Any) -> None:
    with pytest.raises(hal.ArgumentError, match="tokens: expected an int >= 0"):
        SlotAllocator(8).alloc(tokens)


def test_allocator_without_a_page() -> None:
    none = SlotAllocator(3, 4)
    assert none.available == 0
    assert none.alloc(0).tolist() == []
