"""One vLLM engine that does what it is told: ``python vllm_served.py SETTINGS``, a line of JSON each way.

Asked for prompts, it answers with their tokens, what its connector says of each, and the blocks that are free then.
What is said besides goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True, "skip_tokenizer_init": True,
    "enable_prefix_caching": False, "disable_log_stats": True, "seed": 0,
}  # fmt: skip


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

    prompts = asked["prompts"]
    kv = asked.get("kv") or [None] * len(prompts)
    params = [
        SamplingParams(
            temperature=0, max_tokens=asked["new"], ignore_eos=True, detokenize=False,
            extra_args=None if one is None else {"kv_transfer_params": one},
        )
        for one in kv
    ]  # fmt: skip
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outs],
        "finish": [o.outputs[0].finish_reason for o in outs],
        "cached": [o.num_cached_tokens or 0 for o in outs],
        "kv": [o.kv_transfer_params for o in outs],
        "free": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def main(settings: str) -> None:
    # vLLM writes to stdout too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = make(json.loads(settings))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        try:
            found = answer(llm, json.loads(line))
        except Exception as e:
            found = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
