"""What `HAL_ENGINES` switches on beside SGLang's own platform for CUDA: HiCache's copies. Run on a CPU."""

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

def code(f):
    return f.__wrapped__.__code__ if hasattr(f, "__wrapped__") else f.__code__

found = {
    "platform": adapter.platform(), "hooks": sorted(HookRegistry._hooks),
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


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")
def test_hicache_alone() -> None:
    """Replaced where SGLang's functions are as expected; else no attention can be made, so that no start goes on."""
    env = {**os.environ, "HAL_ENGINES": "sglang"}
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert "LOOK" in ran.stdout, ran.stderr[-4000:]
    found = json.loads(ran.stdout.split("LOOK", 1)[1])
    pools = "sglang.srt.mem_cache.pool_host."
    assert found["platform"] is None
    assert found["hooks"] == [
        f"{pools}{cls}.{name}"
        for cls in ("mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost")
        for name in ("backup_from_device_all_layer", "load_to_device_per_layer")
    ]
    assert found["made"] == "made"
    assert "HiSparse (--enable-hisparse True)" in found["hisparse"]
    assert "SGLang did not replace sglang.srt.mem_cache.pool_host.mla" in found["undone"]
    assert "where hal knows ['self', 'another']" in found["raised"]
    assert found["another"] == found["raised"]
