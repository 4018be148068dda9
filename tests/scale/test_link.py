"""`Link`: rows between pools that differ in layout, page size and heads."""

from __future__ import annotations

import doctest
import io
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed here: the extra nixl")

import torch
from scale.link_peer import SLOTS, TO, meet, pool, remote_of, rows, until

import hal
from hal.bench import link as bench
from hal.engines.nixl import Link, LinkError, wait, wire
from hal.engines.nixl.slots import Generations

pytestmark = pytest.mark.usefixtures("tcp")


@pytest.mark.parametrize(
    ("src", "dst", "dtype"),
    [
        (("layer_first", 4), ("page_head", 16), "float32"),
        (("page_head", 16), ("layer_first", 1), "bfloat16"),
        (("page_first_direct", 8), ("page_first", 4), "float8_e4m3fn"),
        (("page_first", 1), ("page_first_direct", 16), "float16"),
    ],
)
def test_layouts_and_page_sizes_differ(start: Any, src: Any, dst: Any, dtype: str) -> None:
    a, b = (start(layout=src[0], page=src[1], dtype=dtype, seed=1), start(layout=dst[0], page=dst[1], dtype=dtype))
    peer = meet(a, b)
    wait(a.send(peer, "r", torch.tensor(SLOTS)), b.receive("r", torch.tensor(TO, dtype=torch.int32)))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.pool.dtype.itemsize]
    got, other = rows(b.pool, TO).view(bits), sorted(set(range(64)) - set(TO))
    assert torch.equal(got, rows(a.pool, SLOTS).view(bits))
    assert got.any()
    assert not rows(b.pool, other).view(bits).any()
    assert (a.staging_free, b.staging_free) == (64, 64)


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_in_pieces(start: Any, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Complete when all of them are; a page each here."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 1)
    a, b = start(layout="page_head", seed=1), start(layout="layer_first", page=16)
    peer = meet(a, b)
    if first == "sender":
        sent, received = a.send(peer, "r", torch.tensor(SLOTS)), b.receive("r", torch.tensor(TO))
    else:
        received = b.receive("r", torch.tensor(TO))
        until(a, lambda: "r" in peer.wants)
        sent = a.send(peer, "r", torch.tensor(SLOTS))
    wait(sent, received)
    assert len(sent.packed) == 3
    assert torch.equal(rows(b.pool, TO), rows(a.pool, SLOTS))
    assert (a.staging_free, b.staging_free) == (64, 64)


def test_latent_rows_without_heads() -> None:
    src = hal.KVPool(torch.randn(2, 32, 24), None, "layer_first", 4)
    dst = hal.KVPool([torch.zeros(32, 1, 24) for _ in range(2)], None, "layer_first", 16)
    with Link(src, model="m", staging=32) as a, Link(dst, model="m", staging=32) as b:
        peer = meet(a, b)
        wait(a.send(peer, "r", torch.arange(20)), b.receive("r", torch.arange(10, 30)))
    assert torch.equal(torch.stack(list(dst.k))[:, 10:30, 0], src.k[:, :20])


PARTS = {"2 to 1": ((2, 2), (4,)), "1 to 2": ((4,), (2, 2)), "3 to 2": ((2, 2, 2), (3, 3))}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_heads_are_parted_otherwise(start: Any, parts: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    total = sum(parts[0])
    full = pool(heads=total, seed=3)

    def side(sizes: tuple[int, ...], layout: str, page: int) -> list[Link]:
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            start(layout=layout, page=page, heads=range(i, i + n), total_heads=total, rows=n)
            for i, n in zip(begins, sizes, strict=True)
        ]

    senders, receivers = side(parts[0], "page_head", 4), side(parts[1], "layer_first", 16)
    for link in senders:
        for mine, all_heads in zip(link.pool.tensors, full.tensors, strict=True):
            part = all_heads[:, :, link.heads.start : link.heads.stop].unflatten(1, (-1, 4))
            mine.copy_(part.permute(1, 3, 2, 0, 4))
    moves = [b.receive("r", torch.tensor(TO), [p for a in senders if (p := back(a, b))]) for b in receivers]
    for a in senders:
        moves += [a.send(peer, "r", torch.tensor(SLOTS)) for peer in a.peers]
    wait(*moves)
    got = torch.cat([rows(b.pool, TO) for b in receivers], dim=3)
    assert torch.equal(got, rows(full, SLOTS))


def back(a: Link, b: Link) -> Any:
    """b's peer a."""
    peer = a.connect(b.address)
    found = b.accept()
    wait(peer, found)
    return found


def test_no_operator_of_torch_indexes_a_list_of_slots() -> None:
    """From 3,000 elements on those wait for other threads, milliseconds each."""
    from torch.utils._python_dispatch import TorchDispatchMode

    called = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    generations = Generations(hal.KVPool(torch.zeros(1, 8192, 1), page_size=16))
    with Seen():
        stamped = generations.stamp(torch.arange(4096))
        generations.check(stamped, "r")
        generations.freed(torch.arange(16))
    with pytest.raises(LinkError, match="a stale list of slots"):
        generations.check(stamped, "r")
    assert "aten.clone.default" in called
    assert not [name for name in called if "index" in name]


def test_the_example() -> None:
    test = doctest.DocTestParser().get_doctest(Link.__doc__ or "", {}, "Link", None, None)
    out = io.StringIO()
    assert not doctest.DocTestRunner().run(test, out=out.write).failed, out.getvalue()


def test_two_processes(start: Any) -> None:
    here, there = start(layout="page_head"), start(remote=True, seed=5)
    remote_of(here, there)
    there.do("begin", "send", "r", SLOTS)
    wait(here.receive("r", torch.tensor(TO)))
    there.do("wait", "r")
    assert torch.equal(rows(here.pool, TO), rows(pool(seed=5), SLOTS))
    assert there.do("free") == 64


def test_bench() -> None:
    found = bench.measure(tokens=16, layers=2, rounds=1, device="cpu", layout="page_head")
    assert found["bytes"] == 16 * 2 * 2 * 8 * 128 * 2
    assert found["link / plain"] == found["link GB/s"] / found["plain GB/s"]
