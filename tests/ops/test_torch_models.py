"""A model whose layers call the ops: compiled, and exported."""

from __future__ import annotations

import copy
import io
import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hal

pytestmark = pytest.mark.usefixtures("fresh")
COMPILER = os.environ.get("CI_ALL") and (shutil.which("g++") or shutil.which("clang++"))
"""A model that inductor compiles runs in vLLM's tests too."""


class Model(nn.Module):
    """Two layers of paged attention; a step writes its table, its caches and a host pool."""

    def __init__(self) -> None:
        super().__init__()
        heads, kv, dim, slots, layers = 4, 2, 16, 64, 2
        self.heads, self.kv, self.dim = heads, kv, dim
        self.qkv = nn.ModuleList(nn.Linear(64, (heads + 2 * kv) * dim) for _ in range(layers))
        self.o = nn.ModuleList(nn.Linear(heads * dim, 64) for _ in range(layers))
        angle = torch.outer(torch.arange(32.0), 10000 ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos_sin", torch.cat([angle.cos(), angle.sin()], dim=-1))
        self.register_buffer("table", torch.zeros(8, 32, dtype=torch.int32))
        for name, shape in (("k", (layers, slots)), ("v", (layers, slots)), ("host", (slots, layers))):
            self.register_buffer(name, torch.zeros(*shape, kv, dim))
        self.ops = hal.torch_ops()

    def forward(self, x: Tensor, rows: Tensor, lens: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        ops = self.ops
        slots = torch.empty_like(lens)
        last = ops.get_last_loc(self.table, rows, lens - 1)
        pages = ops.alloc_decode(lens, last, free, 1, slots)
        ops.write_req_to_token(self.table, rows, lens - 1, lens, slots)
        indptr = torch.empty(rows.shape[0] + 1, dtype=torch.int32)
        indices = ops.build_kv_indices(self.table, rows, lens, indptr, torch.full((256,), -1, dtype=torch.int32))
        for i, (qkv, o) in enumerate(zip(self.qkv, self.o, strict=True)):
            parts = qkv(x).view(x.shape[0], -1, self.dim)
            q, k, v = parts.split([self.heads, self.kv, self.kv], dim=1)
            ops.rope_kv_write(q, k, v, self.cos_sin, lens - 1, self.k[i], self.v[i], slots)
            out = torch.empty_like(q) if i else None
            seen = ops.decode_attention(q, self.k[i], self.v[i], indptr, indices, out, scale=0.25, logit_cap=9.0 * i)
            x = x + o(seen.flatten(1))
        torch.ops.hal.kv_transfer(
            [self.k], [], "layer_first", 1, False, [self.host], [], "page_first", 1, False, slots, slots
        )
        return x, slots + pages


def steps(call: Any, model: nn.Module, bs: int) -> list[Tensor]:
    """Three decode steps: their results, then the buffers."""
    g = torch.Generator().manual_seed(bs)
    lens, rows = torch.ones(bs, dtype=torch.int64), torch.randperm(8, generator=g)[:bs]
    free, found = torch.randperm(64, generator=g), []
    with torch.no_grad():
        for t in range(3):
            y, slots = call(torch.randn(bs, 64, generator=g), rows, lens, free[t * bs : (t + 1) * bs])
            found += [y, slots]
            lens = lens + 1
    return found + [b.clone() for b in model.buffers()]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(float(x.float().abs().sum()) > 0 for x in wanted)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Model().eval()


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not COMPILER, reason="ci/test all, and a C++ compiler")),
    ],
)
def test_compiled_model(model: Model, backend: str) -> None:
    """No graph break (fullgraph); the same numbers, caches and table; other batch sizes make one more graph."""
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    for bs in (3, 5, 4):
        same(steps(compiled, other, bs), steps(model, model, bs))
    assert graphs["unique_graphs"] == 2


def test_exported_model(model: Model) -> None:
    """As exported, decomposed, and after a way through a file."""
    x, rows, lens, free = (torch.randn(3, 64), torch.arange(3), torch.ones(3, dtype=torch.int64), torch.arange(3))
    exported = torch.export.export(copy.deepcopy(model), (x, rows, lens, free))
    targets = {str(n.target) for n in exported.graph.nodes}
    assert {"hal.rope_kv_write.default", "hal.decode_attention.default", "hal.decode_attention.into"} <= targets
    kept = io.BytesIO()
    torch.export.save(exported, kept)
    kept.seek(0)
    wanted = steps(model, model, 3)
    for program in (exported, exported.run_decompositions(), torch.export.load(kept)):
        module = program.module()
        found = steps(module, module, 3)
        named = dict(zip([n for n, _ in module.named_buffers()], found[6:], strict=True))
        same(found[:6] + [named[n] for n, _ in model.named_buffers()], wanted)
