"""kv_transfer of this backend where the suite leaves it the choice: every sample by copies, and in several chunks."""

import os
from typing import Any

import pytest
import torch

from hal import ops
from hal._remote.target import DirectTarget
from hal.backends.cuda.kv_transfer import kv_transfer
from hal.conformance.execute import execute
from hal.kv.pool import KVPool

CUDA = torch.cuda.is_available()
SPEC = ops.get_spec("kv_transfer")
SAMPLES = [s for s in SPEC.samples if not s.large][:: 1 if CUDA or os.environ.get("CI_ALL") else 3]
WAYS = ("device-to-host-cpu-slots", "host-to-device-cpu-slots") if CUDA else ("",)

pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def judge(where: str, **params: Any) -> None:
    target = DirectTarget.of("kv_transfer", kv_transfer, "cuda" if CUDA else "cpu")
    execute(SPEC, SPEC.make(**{**params, "method": "direct"}), target, where=where)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_sample(sample: Any, way: str) -> None:
    judge(way, **sample.params)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_pipeline_over_several_chunks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than both staging buffers hold, in broken runs."""
    from hal.backends.cuda import _staging

    monkeypatch.setattr(_staging, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(_staging, "_buffers", {})
    some = {"n": 60, "src_slots": 128, "dst_slots": 128, "order": "pages"}
    judge(WAYS[0], **some, src="layer_first", dst=layout)
    if CUDA:
        judge(WAYS[1], **some, src=layout, dst="layer_first")


def test_a_later_transfer_finds_where_the_pools_are_now() -> None:
    """Pools that rows have gone between are known by where they lie: given other memory, they are read there."""
    where = "cuda" if CUDA else "cpu"
    slots = torch.arange(4, device=where, dtype=torch.int64)
    memory = torch.ones(2, 8, 2, 16, device=where, dtype=torch.bfloat16)
    src = KVPool(memory, layout="layer_first")
    dst = KVPool(torch.zeros_like(memory), layout="layer_first")
    for n in (1, 2):
        kv_transfer(src, dst, slots[:n], slots[:n], method="kernel")
    assert dst.k.sum() == 2 * 2 * 32
    memory.set_(torch.full_like(memory, 3))
    kv_transfer(src, dst, slots, slots, layers=range(1, 2), method="kernel")
    kv_transfer(src, dst, slots[:0], slots[:0], method="kernel")
    assert dst.k[0].sum() == 2 * 32
    assert dst.k[1].sum() == 3 * 4 * 32
