"""vLLM engines that do what they are told: `served.main`.

They answer prompts with their tokens, what the connector says of each, the blocks that are free then, and hal's calls.
"""

from __future__ import annotations

import sys
from typing import Any

from scale import served

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    # In bytes, or vLLM asks the machine for nearly all its memory.
    "kv_cache_memory_bytes": 64 << 20,
}


def make(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    # vLLM 0.32 on a CPU reads the `__dict__` of all that modules hold; one of llvmlite's objects has none.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    llm = LLM(**{**SETTINGS, **settings})
    if hidden is not None:
        sys.modules["llvmlite.binding.ffi"] = hidden
    return llm


def answer(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    import hal

    kv = asked.get("kv") or [None] * len(asked["prompts"])
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=asked.get("new", 12),
            ignore_eos=True,
            detokenize=False,
            extra_args=None if one is None else {"kv_transfer_params": one},
        )
        for one in kv
    ]
    hal.trace(reset=True)
    outs = llm.generate([{"prompt_token_ids": p} for p in asked["prompts"]], params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outs],
        "finish": [o.outputs[0].finish_reason for o in outs],
        "kv": [o.kv_transfer_params for o in outs],
        "free": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "calls": {row.op: row.calls for row in hal.trace().rows},
    }


if __name__ == "__main__":
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.model_executor.models import ModelRegistry

    # By a process that imports all of vLLM once more; what it finds is inherited.
    ModelRegistry._try_inspect_model_cls("LlamaForCausalLM")
    served.main(make, answer)
