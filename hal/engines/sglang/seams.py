"""Where hal's functions take the place of SGLang's: its tables where it has one, its `HookRegistry` for the rest.

Both tables were read against SGLang 0.5.17 and 0.5.23; each target's parameters are looked at before any is replaced.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hal._errors import HalError
from hal.engines import EngineError, require
from hal.engines.sglang import limits

KEY = "hal"
"""The name of hal's forward in SGLang's `BaseFusedOp`."""

ALLOCATION = "sglang.srt.mem_cache.allocation"
HOST = "sglang.srt.mem_cache.pool_host"
SPECULATIVE = "sglang.kernels.ops.speculative"
DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
TREES = ("build_tree_kernel_efficient_func", "verify_tree_greedy_func")
HICACHE: dict[str, str] = {
    f"{HOST}.{kind}.{cls}.{name}": f"hicache.{name}"
    for kind, cls in (("mha", "MHATokenToKVPoolHost"), ("mla", "MLATokenToKVPoolHost"))
    for name in ("load_to_device_per_layer", "backup_from_device_all_layer")
}
"""HiCache's copies."""

SLOTS: dict[str, str] = {
    f"{ALLOCATION}.write_cache_indices": "allocation.write_cache_indices",
    f"{ALLOCATION}.get_last_loc": "kernels.get_last_loc",
    "sglang.srt.model_executor.forward_batch_info.compute_position": "allocation.compute_position",
}
"""Tokens' slots and positions."""

PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
BESIDE_CUDA: dict[str, str] = {
    **SLOTS,
    **{f"{PAGED}.{name}": f"allocation.{name}" for name in ("alloc_extend", "alloc_decode")},
    f"{ALLOCATION}.assign_req_to_token_pool_func": "speculative.assign_req_to_token_pool_func",
    f"{SPECULATIVE}.cache_locs.assign_extend_cache_locs_func": "kernels.assign_extend_cache_locs_func",
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda": "rotary.forward",
    **HICACHE,
}
"""What is replaced beside SGLang's own platform for CUDA, which makes KV pools of its own."""

HOOKS: dict[str, str] = {
    **SLOTS,
    "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper": "cpu.get_rope_wrapper",
    "sglang.kernels.ops.activation.softcap.softcap_inplace_logits": "cpu.softcap_inplace_logits",
    **HICACHE,
    "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds": "apart.normalize_kv_mem_kinds",
    "sglang.srt.models.utils.enable_fused_set_kv_buffer": "rotary.enable_fused_set_kv_buffer",
}
"""SGLang's function, and hal's in its place: the same parameters, and of hal's own such as have defaults."""

CHAINS: dict[str, str] = {
    "sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.set_embed_and_head": "cpu.set_embed_and_head",
    **{f"{SPECULATIVE}.spec_tree.{name}": f"trees.{name}" for name in TREES},
    **{
        f"{path}.{name}": f"speculative.{name}"
        for path, name in (
            (ALLOCATION, "assign_req_to_token_pool_func"),
            (f"{SPECULATIVE}.cache_locs", "assign_draft_cache_locs_contiguous_func"),
            (f"{SPECULATIVE}.cache_locs", "fill_front_out_cache_loc_func"),
            (f"{SPECULATIVE}.eagle", "fill_accept_out_cache_loc_func"),
            (f"{SPECULATIVE}.eagle", "fill_bonus_tokens_func"),
            ("sglang.srt.speculative.spec_utils", "select_top_k_tokens"),
            (DRAFTS, "create_decode_backend"),
            (DRAFTS, "create_draft_extend_backend"),
        )
    },
    f"{SPECULATIVE}.ngram_corpus.get_ngram_corpus_cls": "ngram.get_ngram_corpus_cls",
}
"""The same for speculative decoding, where SGLang can do it out of tree: `limits.has_chains`."""

SAMPLING = {
    "tree_speculative_sampling_target_only": "trees.tree_speculative_sampling_target_only",
    "top_k_renorm_prob": "speculative.top_k_renorm_prob",
    "top_p_renorm_prob": "speculative.top_p_renorm_prob",
}
"""Functions of verifying that are None in `speculative.eagle_utils` where there is no CUDA."""

_failed: HalError | None = None
_replaced: dict[str, Any] = {}


def install() -> None:
    """Registers all of it, or nothing. `check` tells what was in the way: SGLang only logs what a plugin raises."""
    global _failed
    try:
        _install()
    except Exception as e:
        _failed = e if isinstance(e, HalError) else EngineError(f"hal: sglang can't run on hal: {e!r}")
        raise


def _install() -> None:
    from sglang.kernels.spec import KernelBackend
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache import allocation as slots
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from hal.engines.sglang import allocation, hicache, kernels, rotary

    by_table = hasattr(slots, "ALLOC_FOR_DECODE_FUNCS")
    hooks = {**HOOKS, **(CHAINS if limits.has_chains() else {})}
    if not by_table:
        hooks[f"{ALLOCATION}.alloc_for_decode"] = "allocation.alloc_for_decode"
    found = look(_named(hooks))
    rotary.register()
    for name in ATTENTION_BACKENDS:
        if name != "hal":
            ATTENTION_BACKENDS[name] = functools.partial(_refuse, name)
    if by_table:
        for device in ("cpu", "npu"):
            slots.ALLOC_FOR_DECODE_FUNCS[device] = allocation.alloc_for_decode
    ALLOC_MEMORY_FUNCS["cpu"] = hicache.allocate
    # New and cached tokens are read from the same latent rows: prefill is no other case than decode.
    AttentionBackendRegistry.register("hal", lambda attention, forward_batch: AttnForwardMethod.MLA)
    if hasattr(KernelBackend, "PLUGIN"):
        kernels.register()
    if limits.has_chains():
        _install_sampling()
    _replace(hooks, found)


def look(hooks: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """SGLang's functions, whose parameters are those that hal's know.

    Raises:
        EngineError: one has others.
    """
    found = {target: pkgutil.resolve_name(target) for target in hooks}
    for target, theirs in found.items():
        has, known = list(inspect.signature(theirs).parameters), inspect.signature(hooks[target]).parameters
        if has != [n for n, p in known.items() if n in has or p.default is p.empty]:
            raise EngineError(f"hal: sglang can't run on hal: {target} takes {has}, where hal knows {list(known)}")
    return found


def _replace(hooks: dict[str, str], found: dict[str, Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, name in hooks.items():
        HookRegistry.register(target, _ours(name), HookType.REPLACE)
    _replaced.update(found)


def _ours(name: str) -> Any:
    from hal.engines.sglang import HERE

    return pkgutil.resolve_name(f"{HERE}.{name}")


def _named(hooks: dict[str, str]) -> dict[str, Any]:
    return {target: _ours(name) for target, name in hooks.items()}


def install_beside_cuda() -> None:
    """`BESIDE_CUDA`. Every attention of SGLang's looks first whether all are in place: else no start."""
    global _failed
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name, make in ATTENTION_BACKENDS.items():
        ATTENTION_BACKENDS[name] = functools.partial(_checked, make)
    try:
        require("sglang")
        hooks = dict(BESIDE_CUDA)
        if not limits.has_chains():
            # Later ones have a table by device, and one kernel for more than slots.
            hooks[f"{ALLOCATION}.alloc_for_decode"] = "allocation.alloc_for_decode"
            name = "assign_extend_cache_locs_uniform_func"
            hooks[f"{SPECULATIVE}.cache_locs.{name}"] = f"speculative.{name}"
        _replace(hooks, look(_named(hooks)))
    except Exception as e:
        _failed = e if isinstance(e, HalError) else EngineError(f"hal: sglang can't run on hal: {e!r}")
        raise


def _checked(make: Any, runner: Any) -> Any:
    check()
    reasons = limits.of_hicache(runner.server_args)
    if reasons:
        raise limits.refusal(reasons)
    return make(runner)


def _install_sampling() -> None:
    from sglang.srt.speculative import eagle_utils

    from hal.engines.sglang import HERE, trees

    for name, ours_of_it in SAMPLING.items():
        if getattr(eagle_utils, name) is None:
            setattr(eagle_utils, name, pkgutil.resolve_name(f"{HERE}.{ours_of_it}"))
    # Its import ends without `sgl_kernel`; it has one function that anybody calls.
    sys.modules[f"{SPECULATIVE}.reconstruct_tree"] = trees


def _refuse(name: str, runner: Any) -> None:
    raise limits.refusal([f"SGLang gives this model its attention {name}"])


def check() -> None:
    """Raises:
    EngineError: not all of HOOKS are in place, or a seam was not as expected.
    """
    if _failed is not None:
        raise _failed
    if not _replaced:
        raise EngineError(
            "hal: sglang can't run on hal: its plugin `hal` was not loaded — SGLANG_PLUGINS must not leave it out"
        )
    missing = [t for t, was in _replaced.items() if pkgutil.resolve_name(t) is was]
    if missing:
        raise EngineError(
            f"hal: sglang can't run on hal: SGLang did not replace {', '.join(missing)}; its log says why"
        )
