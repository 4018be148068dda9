"""SGLang engines that do what they are told: `served.main`. They answer prompts with tokens and how each ended."""

from __future__ import annotations

import multiprocessing
from typing import Any

from scale import served

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "page_size": 16,
    "skip_tokenizer_init": True,
    "log_level": "info",
    "random_seed": 0,
    "host": "127.0.0.1",
    # Else its scheduler takes a core for as long as it has nothing to do.
    "sleep_on_idle": True,
}


def make(settings: dict[str, Any]) -> Any:
    from sglang import Engine

    return Engine(**{**SETTINGS, **settings})


def answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("free"):
        (load,) = engine.loop.run_until_complete(engine.tokenizer_manager.get_loads(include=["core"]))
        return {"used": load.num_used_tokens}
    from fastapi import HTTPException

    n, first = len(asked["prompts"]), asked.get("room")
    rooms = {}
    if first is not None:
        rooms = {
            "bootstrap_host": ["127.0.0.1"] * n,
            "bootstrap_port": [asked["port"]] * n,
            "bootstrap_room": list(range(first, first + n)),
        }
    sampling = {"temperature": 0, "max_new_tokens": asked.get("new", 12), "ignore_eos": True}
    try:
        outs = engine.generate(input_ids=asked["prompts"], sampling_params=sampling, **rooms)
    except (ValueError, HTTPException) as e:  # what SGLang raises where a request was aborted
        return {"aborted": str(e)}
    return {"tokens": [o["output_ids"] for o in outs], "finish": [o["meta_info"]["finish_reason"] for o in outs]}


if __name__ == "__main__":
    import sglang.srt.entrypoints.engine as module
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # Where nobody listens it asks fifteen times, and takes a core between them: not a second between.
    init = DecodePreallocQueue.__init__

    def often(queue: Any, *args: Any, **kwargs: Any) -> None:
        init(queue, *args, **kwargs)
        queue._ensure_retry_interval = 0.2

    DecodePreallocQueue.__init__ = often
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = module.mp.set_start_method = lambda *a, **k: None  # type: ignore[assignment]
    served.main(make, answer)
