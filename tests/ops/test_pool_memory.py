"""A pool follows the memory of its tensors: copies, child processes, tensors that moved or are gone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import hal
from hal.kv.pool import KVPool


def pool(listed: bool = False) -> KVPool:
    k, v = torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    return KVPool(list(k.unbind()), list(v.unbind())) if listed else KVPool(k, v)


def moves(p: KVPool) -> None:
    """A transfer into p writes p's own tensors."""
    source = KVPool(torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8))
    for backend in ("cpu", "reference"):
        hal.kv_transfer(source, p, torch.tensor([3]), torch.tensor([5]), backend=backend)
        for layer in range(2):
            mine, v = p.layer(layer)
            assert v is not None
            assert torch.equal(mine[5], source.k[layer][3])
            assert torch.equal(v[5], source.v[layer][3])  # type: ignore[index]


@pytest.mark.parametrize("listed", [False, True])
def test_copies_of_a_pool_have_addresses_of_their_own(listed: bool) -> None:
    p = pool(listed)
    images = [t.clone() for t in p.tensors]
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), torch.load(buffer, weights_only=False)):
        assert other.key == p.key
        assert other.planes()[0].bases != p.planes()[0].bases
        moves(other)
        assert all(map(torch.equal, images, p.tensors))
    same = copy.copy(p)
    assert same.planes() == p.planes()


def _child(p: KVPool) -> None:
    moves(p)


@pytest.mark.parametrize("listed", [False, True])
def test_a_pool_in_a_child_process(listed: bool) -> None:
    p = pool(listed)
    p.planes()
    child = torch.multiprocessing.get_context("spawn").Process(target=_child, args=(p,))
    child.start()
    child.join(600)
    assert child.exitcode == 0
    assert bool((p.layer(0)[0][5] != 0).all())
    moves(p)  # sending it has moved its tensors to shared memory


@pytest.mark.parametrize("listed", [False, True])
def test_a_pool_follows_its_tensors(listed: bool) -> None:
    p = pool(listed)
    p.tensors[-1].share_memory_()
    moves(p)
    p.tensors[0].set_(p.tensors[0].clone())  # type: ignore[call-overload]
    moves(p)


def test_a_pool_whose_memory_is_gone_is_refused() -> None:
    p = pool()
    moves(p)
    size = p.tensors[1].untyped_storage().nbytes()
    slot = torch.tensor([1])
    memory = p.tensors[1].untyped_storage()
    for left in (0, size // 2):
        memory.resize_(left)
        with pytest.raises(hal.ArgumentError, match="v: expected tensors whose values are in memory"):
            hal.kv_transfer(pool(), p, slot, slot, backend="cpu")
    p._extents = [(t.data_ptr(), size) for t in p.tensors]  # as if the whole had been there too: allocators do so
    with pytest.raises(hal.ArgumentError, match="v: expected tensors whose values are in memory"):
        p.planes()
    memory.resize_(size)
    moves(p)
    q = pool(listed=True)
    for t in q.tensors:
        t.data = torch.zeros(8, 2, 8)
    with pytest.raises(hal.ArgumentError, match="make a new KVPool"):
        q.planes()
