"""The Triton kernels of the ops beyond the core, compiled: nothing may spill, in one case but between loops. `ci/test
all`: every kind of GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from assembler import put_aside
from engine.cases import OPS

pytest.importorskip("triton", reason="Triton is not installed here")

ASIDE = {
    ("decode_attention", "past-one-block", 90, False): 8,
    ("decode_attention", "past-one-block", 90, True): 16,
    ("decode_attention", "nan-in-one-request-bf16", 90, False): 8,
    ("decode_attention", "nan-in-one-request-bf16", 90, True): 24,
    ("decode_attention", "nan-in-one-request-fp16", 90, False): 8,
    ("decode_attention", "nan-in-one-request-fp16", 90, True): 24,
    ("extend_attention", "nan-in-one-request-fp32", 80, False): 8,
}
"""Bytes of numbers that are put aside before the loop over keys, and taken back behind it, where the assembler makes
128 registers do; or is told to make 168 do, of a program that may have shares of several requests (True)."""
ARCHES = (80, 90, 100) if os.environ.get("CI_ALL") else (90,)

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("op", "only"),
    [
        *((op, "one") for op in OPS),
        ("kv_write", "fp16-scale"),
        ("kv_write", "fp32-scale"),
        ("mla_kv_write", "deepseek-paged"),
        ("mla_rope_kv_write", "deepseek-v3"),
        ("mla_rope_kv_write", "fp32-scale"),
        ("qk_norm_rope_kv_write", "qwen3-0.6b"),
        ("qk_norm_rope_kv_write", "fp32-scale"),
        ("kv_move", "mla-page_first_direct"),
    ],
)
def test_compiles_without_spills(op: str, only: str, arch: int) -> None:
    from hal.backends.cuda import inspect

    if "scale" in only and arch < 90:
        pytest.skip("no conversion to fp8")
    rows = list(inspect.op(op, arch=arch, only=only))
    assert rows
    for row in rows:
        assert row.spills <= ASIDE.get((op, row.case, arch, _shares(row.static)), 0), row


def _shares(static: dict[str, Any]) -> bool:
    return bool(static.get("ENOUGH"))


@pytest.mark.parametrize(("op", "case", "arch", "shares"), ASIDE)
def test_what_is_put_aside_is_not_so_tile_after_tile(
    op: str, case: str, arch: int, shares: bool, tmp_path: Path
) -> None:
    from hal.backends.cuda import inspect
    from hal.ops import get_spec

    sample = next(s for s in get_spec(op).samples if s.name == case)
    calls = [call for call in inspect.calls(op, sample, arch) if _shares(call[0].static) == shares]
    cubins = [inspect.compile_call(call, arch).asm["cubin"] for call in calls]
    cubins = [cubin for cubin in cubins if inspect.resources(cubin)[1]]
    assert max(inspect.resources(cubin)[1] for cubin in cubins) == ASIDE[op, case, arch, shares]
    assert not [line for cubin in cubins for line in put_aside(cubin, tmp_path, "HGMMA|LDG")]


def test_kernels_call_no_function_that_an_engine_replaces() -> None:
    """SGLang puts a plain function in this one's place, which no kernel can call."""
    import hal.backends.cuda

    for file in Path(hal.backends.cuda.__file__).parent.glob("*.py"):
        assert "triton.next_power_of_2" not in file.read_text(encoding="utf-8"), file.name


@pytest.mark.parametrize("by_page", [True, False])
def test_the_bench_s_decode_by_block_table_is_no_worse_off_than_the_op_s(by_page: bool) -> None:
    """Or its times would say nothing: no spills, and as many copies in flight."""
    import torch

    from hal.backends.cuda import inspect
    from hal.backends.cuda.decode_attention import decode_attention
    from hal.bench.cuda.block_table import decode_by_blocks

    q = torch.zeros(4, 32, 128, dtype=torch.bfloat16)
    k, v = (torch.zeros(8, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    indptr, table = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    with inspect.record(90) as calls:
        decode_by_blocks(q, k, v, indptr, table.view(-1), table, torch.empty_like(q), scale=0.1, by_page=by_page)()
        decode_attention(q, k, v, indptr, table.view(-1), torch.empty_like(q), scale=0.1)
    variant = next(c for c in calls if c[0].kernel.name == "decode_by_blocks_kernel")
    named = (c for c in calls if c[0].kernel.name == "decode_attention_kernel")
    op = next(c for c in named if c[0].static["N"] == variant[0].static["N"])
    ours, usual = (inspect.compile_call(c, 90).asm for c in (variant, op))
    copies = "async_copy_global_to_local"
    assert inspect.resources(ours["cubin"])[1] == 0
    assert ours["ttgir"].count(copies) == usual["ttgir"].count(copies) > 0


@pytest.mark.parametrize("op", OPS)
def test_warmup_leaves_nothing_to_compile(op: str) -> None:
    """Every kernel that a sample starts is one that the warm-up of its form has started."""
    from hal.backends.cuda import inspect, warmup
    from hal.ops import get_spec

    launcher = inspect.launcher(op)

    def started(calls: list[inspect.Call]) -> set[str]:
        return {str((call[0].kernel.name, inspect.form_of(call, 90))) for call in calls}

    seen = 0
    for sample in get_spec(op).samples:
        if sample.large:
            continue
        args = get_spec(op).make(**sample.params)
        with inspect.record() as found:
            for call in warmup.calls(op, args):
                launcher(**call)
            warm = started(found)
        with inspect.record() as found:
            launcher(**args)
            usual = started(found)
        assert usual <= warm, sample.name
        seen += bool(usual)
    assert seen > 3


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_with_a_parent_that_is_killed() -> None:
    """One in the middle of its work, one that waits for some."""
    code = """
import time
from hal.backends.cuda import inspect
with inspect._pool(2) as pool:
    list(pool.map(time.sleep, (0.5, 0.5)))
    pool.submit(time.sleep, 600)
    print(*pool._processes, flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert len(pids) == 2
    end = time.monotonic() + 300
    try:
        while any(map(_alive, pids)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(_alive, pids))
    finally:
        for pid in filter(_alive, pids):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
