"""Runs vLLM in this process, on several models one after the other: ``python vllm_worker.py jobs.json results.json``.

A job names a model's folder, what is added to the environment, settings of ``LLM``, and rounds of prompts; its result
says which tokens came, what the model was built of, and which of hal's ops ran on which backend; and in the lowered
lane, how often each kernel was started, and what the trace saw of it. What a job raises is its result too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

KV_BYTES = 64 << 20
"""Of the cache: a request of 256 tokens of SmolLM2 takes 12 MB of it.

Said in bytes, that is all the memory that vLLM's worker asks the machine for at start. Else it asks for a part of all
that there is, and does not start where others hold it.
"""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
    "kv_cache_memory_bytes": KV_BYTES,
}


def classes(model: Any) -> dict[str, list[str]]:
    modules = list(model.modules())
    return {
        "attention": sorted({type(m.impl).__name__ for m in modules if hasattr(m, "impl")}),
        "rotary": sorted({type(m).__name__ for m in modules if hasattr(m, "cos_sin_cache")}),
    }


def build(job: dict[str, Any]) -> tuple[Any, Counter[str]]:
    """The engine of a job, and where its preemptions are counted."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    # What a model's class is, vLLM asks a process that imports all of vLLM for it: longer than a tiny model runs.
    registry._run_in_subprocess = lambda look: look()

    # vLLM 0.32 on a CPU reads the `__dict__` of all that modules hold; an object of llvmlite's, which numba brings, has
    # none that could be read.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    llm = LLM(model=job["model"], **{**SETTINGS, **job.get("llm", {})})
    if hidden is not None:
        sys.modules["llvmlite.binding.ffi"] = hidden
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    counts = Counter[str]()
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *a, **k: (counts.update(["preempted"]), preempt(*a, **k))[1]
    return llm, counts


def clean() -> None:
    """One model's memory at a time, and its groups of processes: a model of experts wants one more than others."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    rotary = sys.modules.get("hal.engines.vllm.rotary")
    if rotary is not None:
        rotary._bound.cache_clear()  # the next job may be another backend's
    gc.collect()
    ensure_kv_transfer_shutdown()  # which the next engine would take for its own
    destroy_model_parallel()
    destroy_distributed_environment()


def run(job: dict[str, Any], llm: Any, counts: Counter[str]) -> dict[str, Any]:
    from vllm import SamplingParams

    counts.clear()
    rounds = []
    for prompts in job["rounds"]:
        given = {"temperature": 0, "max_tokens": job.get("new", 12), "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**{**given, **job.get("sampling", {}), "seed": 17 + i}) for i in range(len(prompts))]
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        rounds.append(
            {"tokens": [list(o.outputs[0].token_ids) for o in outs], "cached": [o.num_cached_tokens or 0 for o in outs]}
        )
    if "tensor_parallel_size" in job.get("llm", {}):
        # vLLM ends its processes, and HAL_TRACE's file is written once a second: by one call more.
        time.sleep(1.1)
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return {"rounds": rounds, "preempted": counts["preempted"], "classes": llm.apply_model(classes)[0]}


def main(jobs: str, results: str) -> None:
    import lowered_lane  # beside this file; who imports this one as a module does not run it

    done: dict[str, Any] = {}
    engine: tuple[Any, ...] | None = None
    for job in json.loads(Path(jobs).read_text()):
        begin = time.monotonic()
        if "env" in job:
            import hal

            os.environ.update(job["env"])
            hal.reload()
        try:
            # Jobs of one model, settings and backend, one after the other, share an engine.
            wanted = job["model"], job.get("llm", {}), job.get("env")
            if engine is None or engine[0] != wanted:
                engine = None
                clean()
                engine = wanted, *build(job)
            if "fault" in job:
                lowered_lane.inject(job["fault"])
            with lowered_lane.watched() as kernels:
                found = run(job, *engine[1:])
            found["kernels"] = kernels
        except Exception as e:
            engine = None
            found = {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}
        trace: dict[str, dict[str, int]] = {}
        if os.environ.get("HAL_TRACE"):
            import hal

            for row in hal.trace(reset=True).rows:
                trace.setdefault(row.op, {})[row.backend] = row.calls
        found["trace"] = trace
        found["modules"] = sorted(m for m in sys.modules if m.startswith(("hal.backends", "hal.engines.")))
        done[job["name"]] = found
        print(f"--- {job['name']} took {time.monotonic() - begin:.1f} s", flush=True)
        Path(results).write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
