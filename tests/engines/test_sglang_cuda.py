"""What `HAL_ENGINES` switches on beside SGLang's own platform for CUDA: slots, rotation, HiCache's copies. On a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

LOOK = """
import json
from types import SimpleNamespace
import hal.engines.sglang as adapter
from hal.engines.sglang import hicache, seams, vision
vision.declare_operators()
adapter.beside_cuda = lambda: True
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.pool_host import mha, mla
from sglang.srt.plugins.hook_registry import HookRegistry

def made(name, **settings):
    args = {"enable_hierarchical_cache": True, "enable_hisparse": False, "enable_page_major_kv_layout": False,
            "enable_unified_memory": False, "kv_cache_dtype": "auto", **settings}
    factory = ATTENTION_BACKENDS[name]
    one = seams.functools.partial(factory.func, lambda runner: "made")
    try:
        return one(SimpleNamespace(server_args=SimpleNamespace(**args)))
    except Exception as e:
        return str(e)

# SGLang's own classes and names, where its Triton kernels were.
import torch
from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

own = PagedTokenToKVPoolAllocator(32 * 4, 4, torch.float32, "cpu", None, False)
own.free_pages = own.free_pages[torch.randperm(32, generator=torch.Generator().manual_seed(0))]
pages, prefix, lens, last = own.free_pages, *(torch.tensor(x) for x in ([3, 0, 8], [9, 5, 10], [402, -1, 403]))
slots, want = own.alloc_extend(prefix, prefix, lens, lens, last, 13), torch.empty(13, dtype=torch.int64)
alloc_extend_naive(prefix, lens, last, pages, want, 4, "cpu")
same = {"extend": torch.equal(slots, want), "pages": len(pages) - len(own.free_pages)}
after = own.free_pages
more = own.alloc_decode(lens + 1, lens + 1, torch.stack([slots[5], slots[10], slots[12]]))
same["decode"] = more.tolist() == [int(slots[5]) + 1, int(slots[10]) + 1, int(slots[12]) + 1]
same["next page"] = int(own.alloc_decode(*[torch.tensor([13])] * 2, torch.tensor([7]))[0]) == 4 * int(after[0])
same["none left"] = own.alloc_extend(*[torch.tensor([0])] * 2, *[torch.tensor([500])] * 2, torch.tensor([-1]), 500)
table, rows = torch.arange(60).view(3, 20).int(), torch.tensor([2, 0])
given = {"req_pool_indices": rows, "req_to_token": table, "start_offset": torch.tensor([5, 7]), "batch_size": 2,
         "draft_token_num": 3, "device": "cpu"}
made_locs = [cache_locs.assign_extend_cache_locs_func(**given, end_offset=torch.tensor([8, 10]))]
if not seams.limits.has_chains():
    made_locs.append(cache_locs.assign_extend_cache_locs_uniform_func(**given))
same["drafts"] = [x.tolist() == [45, 46, 47, 7, 8, 9] for x in made_locs]
rotation = SimpleNamespace(head_size=8, is_neox_style=True, cos_sin_cache=torch.randn(16, 8))
slots = torch.tensor([4, -1, 7])
q, k, v, at = torch.randn(3, 16), torch.randn(3, 8), torch.randn(3, 8), torch.tensor([1, 5, 15])
written = SimpleNamespace(value=v, k_buffer=torch.zeros(9, 8), v_buffer=torch.zeros(9, 8), cache_loc=slots)
(cos, sin), (a, b) = rotation.cos_sin_cache[at, None].chunk(2, -1), torch.cat([q, k], 1).view(3, 3, 8).chunk(2, -1)
turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)
RotaryEmbedding.forward_cuda(rotation, at, q, k, None, written)
same["rotation"] = torch.allclose(torch.cat([q, k], 1), turned, atol=1e-6)
rows = torch.zeros(2, 9, 8)
rows[:, [4, 7]] = torch.stack([k, v])[:, [0, 2]]
same["write"] = torch.equal(torch.stack([written.k_buffer, written.v_buffer]), rows)

found = {
    "same": same, "platform": adapter.platform(), "hooks": sorted(HookRegistry._hooks),
    "made": made("triton"), "hisparse": made("triton", enable_hisparse=True),
}
name = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.load_to_device_per_layer"
was, seams._replaced[name] = seams._replaced[name], mla.MLATokenToKVPoolHost.load_to_device_per_layer
found["undone"] = made("triton")
seams._replaced[name] = was
hicache.load_to_device_per_layer = lambda self, another: None
try:
    seams.install_beside_cuda()
except Exception as e:
    found["raised"] = str(e)
found["another"] = made("triton")
print("LOOK" + json.dumps(found))
"""


COPIES = "backup_from_device_all_layer", "load_to_device_per_layer"
CLASSES = "mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost"
REPLACED = (
    "layers.rotary_embedding.base.RotaryEmbedding.forward_cuda",
    "mem_cache.allocation.get_last_loc",
    "mem_cache.allocation.write_cache_indices",
    "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode",
    "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
    "model_executor.forward_batch_info.compute_position",
)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")
def test_beside_cuda() -> None:
    """Replaced where SGLang's functions are as expected; else no attention can be made, so that no start goes on."""
    env = {**os.environ, "HAL_ENGINES": "sglang"}
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert "LOOK" in ran.stdout, ran.stderr[-4000:]
    found = json.loads(ran.stdout.split("LOOK", 1)[1])
    pools = "sglang.srt.mem_cache.pool_host."
    assert found["platform"] is None
    assert set(found["hooks"]) >= {
        *(f"{pools}{cls}.{name}" for cls in CLASSES for name in COPIES),
        *(f"sglang.srt.{name}" for name in REPLACED),
    }
    same = found["same"]
    assert (same.pop("pages"), same.pop("none left")) == (5, None)
    assert same.pop("drafts") in ([True], [True, True])
    assert all(same.values()), same
    assert found["made"] == "made"
    assert "HiSparse (--enable-hisparse True)" in found["hisparse"]
    assert "SGLang did not replace sglang.srt.mem_cache.pool_host.mla" in found["undone"]
    assert "where hal knows ['self', 'another']" in found["raised"]
    assert found["another"] == found["raised"]
