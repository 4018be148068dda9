"""kv_transfer of this backend: every sample of the contract, by every method, in either direction."""

import os
from typing import Any

import pytest
import torch

from hal import ops
from hal.backends.cuda.kv_transfer import kv_transfer
from hal.kv.pool import KVPool
from hal.ops.kv_transfer import stacked
from hal.ops.proofs import judge as _judge

CUDA = torch.cuda.is_available()
SPEC = ops.get_spec("kv_transfer")

pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def on(pool: KVPool, where: str) -> KVPool:
    """The same pool, strides too, on the device, in pinned or in pageable host memory."""

    def one(t: torch.Tensor) -> torch.Tensor:
        raw = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        raw = raw.pin_memory() if where == "pinned" else raw.to("cuda") if where == "device" else raw.clone()
        return torch.empty(0, dtype=t.dtype, device=raw.device).set_(
            raw.untyped_storage(), t.storage_offset(), t.shape, t.stride()
        )

    def half(h: Any) -> Any:
        return None if h is None else [one(t) for t in h] if isinstance(h, tuple) else one(h)

    return KVPool(half(pool.k), half(pool.v), layout=pool.layout, page_size=pool.page_size)


def check(
    args: dict[str, Any], method: str, src: str = "pageable", dst: str = "pageable", slots: str = "cpu"
) -> None:
    want = SPEC.oracle(args)["dst"].fields
    a, b = on(args["src"], src), on(args["dst"], dst)
    before = {x: stacked(getattr(b, x)).cpu().clone() for x in want}
    untouched = {x: stacked(getattr(a, x)).cpu().clone() for x in want}
    kv_transfer(
        a, b, args["src_slots"].to(slots), args["dst_slots"].to(slots), layers=args["layers"], method=method
    )
    if CUDA:
        torch.cuda.synchronize()
    for x, w in want.items():
        out = stacked(getattr(b, x)).cpu()
        assert _judge.right_any(out, w).all(), f"{x}: wrong"
        assert (_judge.same_bits(out, before[x]) | w.named).all(), f"{x}: touched"
        assert _judge.same_bits(stacked(getattr(a, x)).cpu(), untouched[x]).all(), f"src {x}: touched"


SAMPLES = [s for s in SPEC.samples if not s.large]
WAYS = (
    [("device", "pinned", "cpu"), ("pinned", "device", "cpu"), ("device", "device", "cuda"),
     ("device", "pinned", "cuda"),
     ("pageable", "device", "cpu"), ("device", "pageable", "cpu")]
    if CUDA
    else [("pageable", "pageable", "cpu")]
)  # fmt: skip


@pytest.mark.parametrize("method", ["kernel", "direct"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_sample(sample: Any, way: tuple[str, str, str], method: str) -> None:
    if (way[2] == "cuda" and method == "direct") or ("pageable" in way and CUDA and method == "kernel"):
        pytest.skip("not in the contract")
    check(SPEC.make(**sample.params), method, *way)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_pipeline_over_several_chunks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than both staging buffers hold, in broken runs."""
    from hal.backends.cuda import _staging

    monkeypatch.setattr(_staging, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(_staging, "_buffers", {})
    params = {
        "n": 60,
        "src_slots": 128,
        "dst_slots": 128,
        "order": "pages",
        "src": "layer_first",
        "dst": layout,
    }
    check(SPEC.make(**params), "direct", *(WAYS[0]))
    if CUDA:
        check(SPEC.make(**{**params, "src": layout, "dst": "layer_first"}), "direct", "pinned", "device")
