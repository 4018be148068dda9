"""vLLM's KV offloading on `kv_transfer`: blocks to a pool in host memory and back, for its `OffloadingConnector`.

Which blocks, and which must make room, is decided by vLLM's own manager, whose indices are the slots here. A slot of
the host pool is one piece of memory with a block of every layer, so that the copy engine moves it whole. A block can be
read from the host when its store was reported by `get_finished`, and by vLLM's contract not before.

vLLM 0.26 and 0.32 differ: in 0.26 the spec's `num_blocks` are what 0.32 calls `num_chunks`, there is no
`canonical_layout`, and by its older model runner all layers of a block are one tensor's row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

import hal
from hal import KVPool
from hal.engines import EngineError


class HalOffloadingSpec(CPUOffloadingSpec):
    """``spec_name`` in vLLM's ``kv_connector_extra_config``, beside ``cpu_bytes_to_use``: of all processes together.

    Raises:
        EngineError: the host pool would not have a single chunk, or the settings ask for what it can't do.
    """

    # Memory of each process's own: vLLM aligns what its processes share.
    BLOCK_SIZE_ALIGNMENT = 1

    _worker: HalOffloadingWorker | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if getattr(config, "canonical_layout", False):
            raise _error("canonical_layout: hal's host pool has the blocks of one process as they are")
        self.chunks: int = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
        if self.kv_bytes_per_chunk and not self.chunks:
            raise _error(
                f"cpu_bytes_to_use={self.extra_config['cpu_bytes_to_use']} holds no chunk: one takes "
                f"{self.kv_bytes_per_chunk} bytes, {self.blocks_per_chunk} blocks of all layers and processes"
            )

    def _uses_shared_region(self) -> bool:
        return False

    def get_worker(self, kv_caches: Any) -> HalOffloadingWorker:
        if self._worker is None:
            self._worker = HalOffloadingWorker(kv_caches, self.blocks_per_chunk, self.chunks)
        return self._worker


@dataclass
class Transfer:
    """A copy that was submitted. On the CPU it is done by then."""

    job: int
    bytes: int
    seconds: float = 0.0
    start: Any = None
    end: Any = None

    def finished(self) -> bool:
        return self.end is None or bool(self.end.query())

    def result(self) -> TransferResult:
        if self.end is not None:
            self.seconds = self.start.elapsed_time(self.end) * 1e-3
        return TransferResult(self.job, True, self.bytes, self.seconds)


ENGINE_BYTES = 1 << 20
"""Of a block in one piece, from which the copy engine is at its best without gathering: 64 KB are not enough."""


@dataclass
class Pools:
    """vLLM's blocks of one kind of row, and the host's."""

    device: KVPool
    host: KVPool
    whole: bool
    """A block is one piece of memory at both ends, and a large one."""

    @property
    def method(self) -> str:
        """Of `kv_transfer`."""
        return "direct" if self.whole else "auto"


class HalOffloadingWorker(OffloadingWorker):
    """One process's host pool, and the copies to and from it: those of one way one after the other in a stream of their
    own. A step's kernels do not wait for them, and they wait for the kernels that were launched before.

    Args:
        kv_caches: vLLM's blocks, a tensor ``[blocks, bytes]`` a layer (or a set of layers that share memory).
        blocks_per_chunk: of vLLM's blocks in a chunk, which is what its manager counts in.
        chunks: in the host pool.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, chunks: int) -> None:
        pages = [_rows(t.tensor.view(torch.int8)) for t in kv_caches.tensors]
        self.device = pages[0].device
        self.blocks, self.blocks_per_chunk = pages[0].shape[0], blocks_per_chunk
        self.slots = chunks * blocks_per_chunk
        self.host = torch.zeros(
            self.slots * sum(p[0].numel() for p in pages),
            dtype=torch.int8,
            device="cpu",
            pin_memory=self.device.type != "cpu",
        )
        self.groups = self._pools(pages, kv_caches.group_data_refs)
        self.module = torch.get_device_module(self.device) if self.device.type != "cpu" else None
        self.pending: dict[bool, deque[Transfer]] = {store: deque() for store in (True, False)}
        self.streams: dict[bool, Any] = {
            store: self.module.Stream(self.device) if self.module else None for store in self.pending
        }

    def _pools(self, pages: list[Tensor], refs: Any) -> list[list[Pools]]:
        """For each group of layers: pools of each kind of row."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for i, page in enumerate(pages):
            # Rows of one pool are of one size, and one layout.
            kinds.setdefault((page.shape[2], page.stride(0)), []).append(i)
        parts, at = [], 0
        for (size, _), same in kinds.items():
            count = sum(pages[i].shape[1] for i in same)
            part = self.host[at : at + self.slots * count * size].view(self.slots, count, size)
            parts.append((same, part, part.split_with_sizes([pages[i].shape[1] for i in same], dim=1)))
            at += part.numel()
        groups: list[list[Pools]] = []
        for group in refs:
            used = {r.tensor_idx for r in group}
            groups.append([])
            for same, part, columns in parts:
                mine = [i for i in same if i in used]
                if mine:
                    here = KVPool([row for i in mine for row in pages[i].unbind(1)])
                    rows = [row for i, c in zip(same, columns, strict=True) if i in used for row in c.unbind(1)]
                    whole = len(mine) == 1 and pages[mine[0]][0].numel() >= ENGINE_BYTES
                    # Only of all of it is a slot one piece of memory, through which blocks are gathered and staged.
                    staged = mine == same and not whole
                    there = KVPool(part, layout="page_first") if staged else KVPool(rows)
                    groups[-1].append(Pools(here, there, whole))
        return groups

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._submit(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._submit(job_id, dst_spec, src_spec, store=False)
        return True

    def _submit(self, job: int, on_device: Any, on_host: Any, *, store: bool) -> None:
        """Raises:
        EngineError: a block or chunk that does not exist, or the copy failed. Then the job never finishes, so that
            nothing of it is ever read.
        """
        what = f"job {job}, {len(on_device.block_ids)} blocks {'to' if store else 'from'} the host"
        try:
            # Before anything is written: `kv_transfer` passes over slots that are not there.
            slots = list(self._pair(on_device, on_host))
            transfer = Transfer(job, 0)
            with self._apart(transfer, self.streams[store]):
                for pools, (device_slots, host_slots) in zip(self.groups, slots, strict=True):
                    for p in pools if len(device_slots) else ():
                        if store:
                            hal.kv_transfer(p.device, p.host, device_slots, host_slots, method=p.method)
                        else:
                            hal.kv_transfer(p.host, p.device, host_slots, device_slots, method=p.method)
                        transfer.bytes += len(device_slots) * p.device.num_layers * p.device.row_shape[0]
        except Exception as e:
            raise _error(f"{what}: {e}") from e
        self.pending[store].append(transfer)

    @contextmanager
    def _apart(self, transfer: Transfer, stream: Any) -> Iterator[None]:
        """The copies' own stream, behind what the current one has been given; a transfer's time."""
        if self.module is None:
            begin = time.perf_counter()
            yield
            transfer.seconds = time.perf_counter() - begin
            return
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            transfer.start, transfer.end = (self.module.Event(enable_timing=True) for _ in range(2))
            transfer.start.record()
            yield
            transfer.end.record()

    def _pair(self, on_device: Any, on_host: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """For each group of layers: (slots of the device, slots of the host), int64 ``[n]`` on the CPU."""
        blocks, chunks = (ids.block_ids.astype(np.int64) for ids in (on_device, on_host))
        _check("block", blocks, self.blocks)
        _check("chunk of the host pool", chunks, self.slots // self.blocks_per_chunk)
        sizes, firsts = on_device.group_sizes, on_device.block_indices
        if len(sizes) != len(self.groups):
            raise ValueError(f"expected blocks of {len(self.groups)} groups of layers; got {len(sizes)}")
        block = chunk = 0
        for size, first in zip(sizes, firsts, strict=True):
            # A request's blocks may begin in the middle of a chunk.
            skip = first % self.blocks_per_chunk if size else 0
            places = np.arange(skip, skip + size)
            whole = -(-(skip + size) // self.blocks_per_chunk) if size else 0
            here = chunks[chunk : chunk + whole]
            if len(here) != whole or block + size > len(blocks):
                raise ValueError(f"expected {whole} chunks for {size} blocks; got {len(here)} of {len(chunks)}")
            host = here[places // self.blocks_per_chunk] * self.blocks_per_chunk + places % self.blocks_per_chunk
            yield torch.from_numpy(blocks[block : block + size]), torch.from_numpy(host)
            block, chunk = block + size, chunk + whole
        if (block, chunk) != (len(blocks), len(chunks)):
            raise ValueError(
                f"expected {block} blocks and {chunk} chunks, as the groups say; got {len(blocks)} and {len(chunks)}"
            )

    def get_finished(self) -> list[TransferResult]:
        found = []
        for pending in self.pending.values():
            while pending and pending[0].finished():
                found.append(pending.popleft().result())
        return found

    def wait(self, job_ids: set[int]) -> None:
        for transfer in (*self.pending[True], *self.pending[False]):
            if transfer.job in job_ids and transfer.end is not None:
                transfer.end.synchronize()

    def shutdown(self) -> None:
        for pending in self.pending.values():
            self.wait({t.job for t in pending})
            pending.clear()
        self.groups.clear()
        self.host = self.host[:0].clone()


WIDEST = 1 << 16
"""Bytes of a row at most: a kernel holds a row at a time, and a block of all layers has megabytes."""


def _rows(blocks: Tensor) -> Tensor:
    """``[blocks, bytes]`` as ``[blocks, rows, bytes]``: equal rows, in the words of 16 bytes that kernels like best."""
    size = blocks.shape[1]
    whole = 1 if size % 16 else 16
    count = next(n for n in range(-(-size // WIDEST), size + 1) if size % (n * whole) == 0)
    return torch.unflatten(blocks, 1, (count, size // count))


def _check(what: str, ids: np.ndarray, count: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < count):
        raise ValueError(f"expected each {what} in [0, {count}); got {ids.tolist()}")


def _error(what: str) -> EngineError:
    return EngineError(f"hal: vllm's KV offloading on hal: {what}")
