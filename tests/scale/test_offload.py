"""The spec and the worker of vLLM's KV offloading on hal: what is copied where; what goes wrong is never read."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from hal.engines import EngineError
from hal.engines.vllm import choose, offload, register

BLOCKS, CHUNKS = 12, 5
SIZES = (96, 160, 96)
"""Bytes of a block of each tensor."""
GROUPS = ((0, 1), (2, 1))
"""The tensors of each group of layers: one is shared."""


def caches(sizes: tuple[int, ...] = SIZES, groups: tuple[tuple[int, ...], ...] = GROUPS) -> CanonicalKVCaches:
    g = torch.Generator().manual_seed(0)
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 127, (BLOCKS, n), generator=g, dtype=torch.int8, device="cpu"), n)
        for n in sizes
    ]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, sizes[i]) for i in group] for group in groups])


class Pool:
    """A worker, and its blocks as they are."""

    def __init__(self, per_chunk: int = 1, sizes: Any = SIZES, groups: Any = GROUPS) -> None:
        self.caches = caches(sizes, groups)
        self.worker = offload.HalOffloadingWorker(self.caches, per_chunk, CHUNKS)

    def bytes(self) -> list[bytes]:
        return [t.numpy().tobytes() for t in (*(t.tensor for t in self.caches.tensors), self.worker.host)]

    def row(self, tensor: int, block: int) -> list[int]:
        return self.caches.tensors[tensor].tensor[block].tolist()


def blocks(*ids: list[int], firsts: tuple[int, ...] = (0, 0)) -> GPULoadStoreSpec:
    """Blocks of each group."""
    return GPULoadStoreSpec([i for group in ids for i in group], [len(group) for group in ids], firsts)


def chunks(*ids: int) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(list(ids))


def done(pool: Pool) -> list[int]:
    found = pool.worker.get_finished()
    assert all(r.success for r in found)
    return [r.job_id for r in found]


def test_blocks_go_to_the_host_and_come_back_elsewhere() -> None:
    pool = Pool()
    before = [[pool.row(t, b) for b in range(BLOCKS)] for t in range(3)]
    assert pool.worker.submit_store(1, blocks([7, 2], [3]), chunks(4, 0, 2))
    (finished,) = pool.worker.get_finished()
    assert (finished.job_id, finished.success, finished.transfer_size) == (1, True, 3 * (96 + 160))
    assert pool.worker.submit_load(2, chunks(0, 2), blocks([9], [5]))
    assert done(pool) == [2]
    pool.worker.wait({1, 2})
    for tensor in range(3):
        for block in range(BLOCKS):
            group = {9: 0, 5: 1}.get(block)
            source = {9: 2, 5: 3}[block] if group is not None and tensor in GROUPS[group] else block
            assert pool.row(tensor, block) == before[tensor][source], (tensor, block)


def test_a_request_may_begin_in_the_middle_of_a_chunk() -> None:
    pool = Pool(per_chunk=3)
    # Blocks 2, 3, 4 and 5 of a request: the last of one chunk, all of the next.
    pool.worker.submit_store(1, blocks([6, 1, 8, 3], [], firsts=(2, 0)), chunks(4, 1))
    # Tensors 0 and 2 have one size.
    host = pool.worker.host[: CHUNKS * 3 * 192].view(CHUNKS, 3, 2, 96)
    for (chunk, place), block in (((4, 2), 6), ((1, 0), 1), ((1, 1), 8), ((1, 2), 3)):
        assert host[chunk, place, 0].tolist() == pool.row(0, block)
    assert not host[:, :, 1].any()
    assert not host[4, :2].any()
    assert not host[[0, 2, 3]].any()


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((96, 96, 96), "page_first"),
        ((4 * offload.WIDEST,), "page_first"),
        ((3 * 70_000, 16, 3 * 70_000), "page_first"),
        ((9999,), "page_first"),
        # Copied as it is: what is no granule of the host's is not staged.
        ((offload.ENGINE_BYTES + 16,), "layer_first"),
    ],
)
def test_a_slot_of_the_host_is_one_piece_of_memory(sizes: tuple[int, ...], layout: str) -> None:
    """The blocks of all layers that are alike, one after the other, in rows that kernels can hold."""
    pool = Pool(sizes=sizes, groups=(tuple(range(len(sizes))),))
    tensors = [t.tensor for t in pool.caches.tensors]
    before = [t[2].clone() for t in tensors]
    pool.worker.submit_store(1, blocks([7, 2, 9], firsts=(0,)), chunks(4, 0, 3))
    (group,) = pool.worker.groups
    assert sum(p.host.num_layers * p.host.row_shape[0] for p in group) == sum(sizes)
    for p in group:
        assert p.host.layout == layout
        assert p.host.row_shape[0] <= offload.WIDEST
        assert p.method == ("direct" if layout == "layer_first" else "auto")
    same = torch.cat([row for row in before if len(row) == sizes[0]])
    assert torch.equal(pool.worker.host[: len(same)], same)
    pool.worker.submit_load(2, chunks(0), blocks([5], firsts=(0,)))
    assert all(torch.equal(t[5], row) for t, row in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("on_device", "on_host", "why"),
    [
        (blocks([BLOCKS], []), chunks(0), r"expected each block in \[0, 12\); got \[12\]"),
        (blocks([1, -1], []), chunks(0, 1), r"expected each block in \[0, 12\); got \[1, -1\]"),
        (blocks([1], []), chunks(CHUNKS), r"expected each chunk of the host pool in \[0, 5\); got \[5\]"),
        (blocks([1], []), chunks(-1), r"expected each chunk of the host pool in \[0, 5\); got \[-1\]"),
        (blocks([1, 2], []), chunks(0), "expected 2 chunks for 2 blocks; got 1 of 1"),
        (blocks([1], []), chunks(0, 1), "expected 1 blocks and 1 chunks, as the groups say; got 1 and 2"),
        (blocks([1], firsts=(0,)), chunks(0), "expected blocks of 2 groups of layers; got 1"),
    ],
)
@pytest.mark.parametrize("store", [True, False])
def test_a_stale_list_is_an_error_before_anything_is_written(
    store: bool, on_device: GPULoadStoreSpec, on_host: CPULoadStoreSpec, why: str
) -> None:
    pool = Pool()
    before = pool.bytes()
    submit, source, target = pool.worker.submit_store, on_device, on_host
    if not store:
        submit, source, target = pool.worker.submit_load, on_host, on_device
    with pytest.raises(EngineError, match=f"job 3, .* blocks {'to' if store else 'from'} the host: {why}"):
        submit(3, source, target)
    assert pool.bytes() == before
    assert done(pool) == []


# --- with vLLM's manager ----------------------------------------------------------------------------


def config(**changed: Any) -> OffloadingConfig:
    """Of this vLLM: others have fewer fields."""

    def make(of: Any, **given: Any) -> Any:
        return of(**{f.name: given[f.name] for f in fields(of) if f.name in given})

    parallel = make(
        OffloadingParallelConfig,
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    groups = [
        make(OffloadingGroupConfig, tokens_per_block=16, layer_names=(f"layer.{i}",), group_id=i) for i in range(2)
    ]
    plain: OffloadingConfig = make(
        OffloadingConfig,
        groups=tuple(groups),
        worker_kv_bytes_per_block=sum(SIZES),
        enable_kv_cache_events=False,
        extra_config={"spec_name": "HalOffloadingSpec", "cpu_bytes_to_use": CHUNKS * sum(SIZES)},
        engine_id="test",
        model=OffloadingModelConfig("test", "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
    )
    return replace(plain, **changed)


def spec(**changed: Any) -> Any:
    register()
    return OffloadingSpecFactory.create_spec(config(**changed))


KEYS = [make_offload_key(bytes([i]) * 8, 0) for i in range(2 * CHUNKS)]
REQUEST = ReqContext(req_id="test")


def store(manager: Any, worker: Any, keys: list[Any], block: int = 1) -> bool:
    """As vLLM's connector does it. False: there is no room."""
    given = manager.prepare_store(keys, REQUEST)
    if given is None:
        return False
    worker.submit_store(1, blocks([block] * len(keys), []), given.store_spec)
    assert [r.job_id for r in worker.get_finished()] == [1]
    manager.complete_store(keys, REQUEST)
    return True


def test_what_broke_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = spec()
    manager, worker = made.get_manager(), made.get_worker(caches())
    given = manager.prepare_store(KEYS[:CHUNKS], REQUEST)
    copy, calls = offload.hal.kv_transfer, []

    def broken(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise OSError("the link broke")
        copy(*args, **options)

    monkeypatch.setattr(offload.hal, "kv_transfer", broken)
    with pytest.raises(EngineError, match="job 1, 5 blocks to the host: the link broke") as error:
        worker.submit_store(1, blocks([1] * CHUNKS, []), given.store_spec)
    assert isinstance(error.value.__cause__, OSError)
    assert len(calls) == 2
    assert worker.host.any(), "half of it was written"
    assert worker.get_finished() == []
    assert {manager.lookup(k, REQUEST) for k in KEYS[:CHUNKS]} == {LookupResult.HIT_PENDING}
    manager.complete_store(KEYS[:CHUNKS], REQUEST, success=False)
    assert {manager.lookup(k, REQUEST) for k in KEYS[:CHUNKS]} == {LookupResult.MISS}
    # Its room is free again.
    monkeypatch.setattr(offload.hal, "kv_transfer", copy)
    assert store(manager, worker, KEYS[CHUNKS:])


def test_a_full_pool_stores_nothing_and_keeps_what_is_read() -> None:
    made = spec()
    manager, worker = made.get_manager(), made.get_worker(caches())
    assert store(manager, worker, KEYS[:CHUNKS])
    reading = manager.prepare_load(KEYS[:CHUNKS], REQUEST)
    before = worker.host.clone()
    assert not store(manager, worker, KEYS[CHUNKS:], block=2)
    assert torch.equal(worker.host, before)
    worker.submit_load(2, reading, blocks([0, 2, 3, 4, 5], []))
    assert [r.job_id for r in worker.get_finished()] == [2]
    manager.complete_load(KEYS[:CHUNKS], REQUEST)
    # What nobody reads makes room, and is gone then.
    assert store(manager, worker, KEYS[CHUNKS : CHUNKS + 2], block=2)
    found = [manager.lookup(k, REQUEST) for k in KEYS]
    assert found.count(LookupResult.HIT) == CHUNKS
    assert found[CHUNKS : CHUNKS + 2] == [LookupResult.HIT] * 2


def test_shutting_down_frees_the_host_pool() -> None:
    pool = Pool()
    pool.worker.submit_store(1, blocks([1], []), chunks(0))
    pool.worker.shutdown()
    assert done(pool) == []
    assert pool.worker.host.untyped_storage().nbytes() == 0


def test_settings_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"cpu_bytes_to_use=351 holds no chunk: one takes 352 bytes, 1 blocks"):
        spec(extra_config={"spec_name": "HalOffloadingSpec", "cpu_bytes_to_use": 351})
    if hasattr(config(), "canonical_layout"):
        with pytest.raises(EngineError, match="canonical_layout"):
            spec(canonical_layout=True)
    monkeypatch.setattr(choose, "OFFLOADING", (">=98,<99", ">=99"))
    with pytest.raises(EngineError, match=r"tested with vllm>=98,<99 and >=99; this is 0\.\d+"):
        spec()


@pytest.mark.parametrize(
    ("version", "taken"),
    [("0.26.0", True), ("0.27.0", False), ("0.31.2", False), ("0.32.1+cpu", True), ("0.33", False)],
)
def test_versions_whose_seam_was_read_are_taken(monkeypatch: pytest.MonkeyPatch, version: str, taken: bool) -> None:
    monkeypatch.setattr(choose, "require", lambda engine: version)
    if taken:
        assert choose.HalOffloadingSpec is offload.HalOffloadingSpec
        return
    with pytest.raises(EngineError, match=r">=0\.26,<0\.27 and >=0\.32,<0\.33; this is " + version):
        assert choose.HalOffloadingSpec


def test_the_spec_of_0_26(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says `num_blocks`, and its configuration knows no `canonical_layout`."""
    base = offload.CPUOffloadingSpec
    made = base.__init__

    def older(self: Any, given: Any) -> None:
        made(
            self, given if hasattr(given, "replicated_layout") else SimpleNamespace(**vars(given), replicated_layout=0)
        )
        if hasattr(self, "num_chunks"):
            self.num_blocks = self.num_chunks
            del self.num_chunks

    monkeypatch.setattr(base, "__init__", older)
    old = {k: v for k, v in vars(config()).items() if k not in ("canonical_layout", "replicated_layout")}
    worker = offload.HalOffloadingSpec(SimpleNamespace(**old)).get_worker(caches())
    assert worker.slots == CHUNKS
    with pytest.raises(EngineError, match="cpu_bytes_to_use=351 holds no chunk"):
        offload.HalOffloadingSpec(SimpleNamespace(**{**old, "extra_config": {"cpu_bytes_to_use": 351}}))
