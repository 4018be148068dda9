"""Runs SGLang engines, each job in a process of its own: ``python sglang_worker.py jobs.json FOLDER``.

SGLang's import takes longer than an engine's start. So this process imports it once and forks: a job, and in it the
engine's own processes, which SGLang would spawn. A job names a model's folder, what is added to the environment,
settings of ``Engine``, and rounds of prompts; ``FOLDER/<job>.json`` says which tokens came, from where, and which of
hal's ops ran on which backend, ``FOLDER/<job>.log`` is what SGLang said. What a job raises is its result too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lowered_lane

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "page_size": 16,
    "skip_tokenizer_init": True,
    "log_level": "info",
    "random_seed": 0,
    # Else its scheduler takes a core for as long as it has nothing to do.
    "sleep_on_idle": True,
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    from sglang import Engine

    engine = Engine(model_path=job["model"], **{**SETTINGS, **job.get("engine", {})})
    rounds = []
    for prompts in job["rounds"]:
        sampling = {"temperature": 0, "max_new_tokens": job.get("new", 12), "ignore_eos": True}
        sampling.update(job.get("sampling", {}))
        outs = engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds.append(
            {
                "tokens": [o["output_ids"] for o in outs],
                "cached": [o["meta_info"]["cached_tokens"] for o in outs],
                "verified": [o["meta_info"].get("spec_verify_ct", 0) for o in outs],
            }
        )
    info = engine.get_server_info()
    # SGLang kills its processes, and HAL_TRACE's file is written once a second: by one call more.
    time.sleep(1.1)
    engine.generate(input_ids=[[1]], sampling_params={"temperature": 0, "max_new_tokens": 1})
    engine.shutdown()
    return {
        "rounds": rounds,
        "settings": {n: info[n] for n in ("attention_backend", "disable_overlap_schedule", "page_size")},
    }


def in_a_process(job: dict[str, Any], folder: Path) -> None:
    """The job, in the process that was forked for it."""
    os.setsid()
    with (folder / f"{job['name']}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    import hal

    trace = folder / f"{job['name']}.trace"
    os.environ.update({"HAL_TRACE": str(trace), **job.get("env", {})})
    hal.reload()
    begin = time.monotonic()
    if "fault" in job:
        lowered_lane.inject(job["fault"])
    kernels = folder / f"{job['name']}.kernels"
    if lowered_lane.LOWERED:
        lowered_lane.count_all(kernels)
    try:
        found = run(job)
        calls: dict[str, dict[str, int]] = {}
        for row in hal.trace(trace).rows:
            calls.setdefault(row.op, {})[row.backend] = row.calls
        found["trace"] = calls
        found["kernels"] = lowered_lane.counted(kernels)
    except BaseException as e:
        found = {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}
    found["seconds"] = round(time.monotonic() - begin, 1)
    (folder / f"{job['name']}.json").write_text(json.dumps(found))


def stock(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("stock attention ran")


def main(jobs: str, to: str) -> None:
    import torch

    torch.nn.functional.scaled_dot_product_attention = stock
    if lowered_lane.LOWERED:
        lowered_lane.declare_no_device()
    from hal.engines.sglang import vision

    # SGLang 0.5.17 imports torchvision before it asks for a platform.
    vision.declare_operators()
    import sglang.srt.entrypoints.engine as engine
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # Each engine imports every model there is.
    import sglang.srt.models.registry  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = engine.mp.set_start_method = lambda *a, **k: None  # type: ignore[assignment]
    folder = Path(to)

    def work(job: dict[str, Any]) -> None:
        child = multiprocessing.Process(target=in_a_process, args=(job, folder))
        child.start()
        child.join()
        if not (folder / f"{job['name']}.json").exists():
            (folder / f"{job['name']}.json").write_text(json.dumps({"error": f"ended with {child.exitcode}"}))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, json.loads(Path(jobs).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
