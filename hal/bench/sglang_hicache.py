"""Prompts whose KV leaves the device and comes back, in whole engines: ``hal bench engine sglang --returned 4096``.

SGLang without HiCache, with its own copies and with hal's (``HAL_ENGINES=sglang``), a process each, in turn. A prompt
is computed, asked for again while it is on the device, and once more after others have taken its place. The first token
of what comes back must be the kept one's, and all tokens those of SGLang's own copies: both compute alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hal.bench import engine_report, sglang
from hal.bench.shapes import SHAPES

ENGINES = ("without", "stock", "hal")
PROMPTS = 5
"""How many return; the first is a warm-up."""
OTHERS = 3
"""Prompts that take the place of one."""
COPIES = "copies.jsonl"
_pending: list[tuple[str, int, Any, Any]] = []


def register() -> None:
    """As `hal.bench.sglang.register`; HiCache's copies are timed too, on the stream that they are on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sglang.register()
    for name in ("start_loading", "start_writing"):
        HookRegistry.register(f"sglang.srt.managers.cache_controller.HiCacheController.{name}", timed, HookType.AROUND)


def timed(inner: Any, controller: Any, *args: Any) -> Any:
    """A batch of copies: way, tokens, and the clock before and after it on its stream."""
    import torch

    way = "load" if inner.__name__ == "start_loading" else "store"
    queue = controller.load_queue if way == "load" else controller.write_queue
    tokens = sum(len(op.device_indices) for op in queue)
    stream = controller.load_stream if way == "load" else controller.write_stream
    _flush()
    if not tokens:
        return inner(controller, *args)
    if torch.cuda.is_available():
        # What the copies wait for is not theirs: SGLang has their stream wait for the one that calls.
        stream.wait_stream(torch.cuda.current_stream())
    begin = _mark(stream)
    result = inner(controller, *args)
    _pending.append((way, tokens, begin, _mark(stream)))
    return result


def _mark(stream: Any) -> Any:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
    event.record(stream)
    return event


def _flush() -> None:
    from sglang.srt.server_args import get_global_server_args

    done = [p for p in _pending if not hasattr(p[3], "query") or p[3].query()]
    rows = [
        {"way": w, "tokens": n, "ms": a.elapsed_time(b) if hasattr(a, "elapsed_time") else (b - a) * 1e3}
        for w, n, a, b in done
    ]
    del _pending[: len(done)]
    with Path(get_global_server_args().model_path, COPIES).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def child(engine: str, tokens: str, options: str, folder: str) -> None:
    found = measure(engine, int(tokens), sglang.Options(**json.loads(options)), folder)
    Path(folder, sglang.FOUND).write_text(json.dumps(found))


def measure(engine: str, tokens: int, options: sglang.Options, folder: str) -> dict[str, Any]:
    """One engine's rows, and of its copies the GB/s of each way."""
    hicache = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "page_first",
        "hicache_write_policy": "write_through",
    }
    settings = {
        "max_total_tokens": 2 * tokens + tokens // 2,
        "page_size": 64,
        "disable_cuda_graph": True,
        "max_running_requests": 4,
        "chunked_prefill_size": 2 * tokens,
        **hicache,
        **options.settings,
    }
    if engine == "without":
        settings = {k: v for k, v in settings.items() if k not in hicache}
    attention = settings.pop("attention_backend", "triton")
    options = replace(options, decode=(), ttft=(tokens,), settings=settings)
    llm = sglang._engine(attention, options, folder)
    shape = SHAPES[options.shape]

    def ask(seed: int) -> dict[str, Any]:
        prompt = engine_report.prompt(shape["vocab_size"], tokens, seed)
        begin = time.perf_counter()
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        (out,) = llm.generate(input_ids=[prompt], sampling_params=sampling, return_logprob=True)
        seconds, about = time.perf_counter() - begin, out["meta_info"]
        time.sleep(0.2)  # until what is stored has been
        return {
            "ms": seconds * 1e3,
            "cached": about["cached_tokens"],
            "tokens": out["output_ids"],
            "logprobs": [x[0] for x in about["output_token_logprobs"]],
        }

    rows = []
    for i in range(PROMPTS):
        row = {"computed": ask(i), "kept": ask(i)}
        for j in range(OTHERS):
            ask(1000 + OTHERS * i + j)
        rows.append({**row, "returned": ask(i)})
        print(f"{engine}: {i + 1} of {PROMPTS} prompts", file=sys.stderr, flush=True)
    ask(9999)  # a store, at which the copies before it are written down
    found = {"rows": rows, "copies": {}, "settings": settings, "attention": attention}
    llm.shutdown()
    row_bytes = 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2 * shape["num_hidden_layers"]
    file = Path(folder, COPIES)
    copies = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for way in ("load", "store"):
        of = [c for c in copies if c["way"] == way and c["tokens"] >= tokens // 2][1:]
        if of:
            rates = [c["tokens"] * row_bytes / c["ms"] / 1e6 for c in of]
            found["copies"][way] = {
                "GB/s": statistics.median(rates),
                "tokens": sum(c["tokens"] for c in of),
                "all": rates,
            }
    return found


def summary(found: Mapping[str, Any], without: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of one engine: medians, what was cached at the least, and whether its tokens are those without HiCache."""
    rows = found["rows"]
    out: dict[str, Any] = {
        f"{what} ms": statistics.median(r[what]["ms"] for r in rows[1:]) for what in ("computed", "kept", "returned")
    }
    if not found["copies"]:
        return out
    out["returned cached"] = min(r["returned"]["cached"] for r in rows)
    # Later tokens part from the kept one's with SGLang's own copies too.
    first = [(r["returned"], r["kept"]) for r in rows]
    out["first token as kept"] = all(a["tokens"][0] == b["tokens"][0] for a, b in first)
    out["its logprob apart, at most"] = max(abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in first)
    if without is not None:
        for what in ("computed", "kept"):
            theirs = [r[what]["tokens"] for r in without["rows"]]
            out[f"{what} as without"] = [r[what]["tokens"] for r in rows] == theirs
    for way, copies in found["copies"].items():
        out[f"{way} GB/s"], out[f"tokens of {way}s"] = copies["GB/s"], copies["tokens"]
    return out


def main(options: sglang.Options, engines: tuple[str, ...], tokens: int, file: Path | None) -> int:
    """The report of all engines, printed and written; 1 where one failed or gave other tokens than it should have."""
    report: dict[str, Any] = {**sglang.about(options), "tokens": tokens, "runs": {}}
    # Where there is no GPU SGLang runs on hal alone.
    env = {e: {"HAL_ENGINES": "sglang" if e == "hal" or not engine_report.has_gpu() else ""} for e in engines}
    with ExitStack() as stack:
        args = str(tokens), json.dumps(asdict(options))
        children = {e: stack.enter_context(sglang.Child(__name__, "child", e, *args, env=env[e])) for e in engines}
        for engine, one in children.items():
            report["runs"][engine] = one.run()
            engine_report.write(report, file)
    without = report["runs"].get("without")
    good = {e: r for e, r in report["runs"].items() if "error" not in r}
    report["summary"] = {e: summary(r, without if "without" in good else None) for e, r in good.items()}
    if "stock" in good and "hal" in good:
        both = zip(good["stock"]["rows"], good["hal"]["rows"], strict=True)
        pairs = [(a[w], b[w]) for a, b in both for w in ("computed", "kept", "returned")]
        apart = [abs(x - y) for a, b in pairs for x, y in zip(a["logprobs"], b["logprobs"], strict=True)]
        report["summary"]["hal"]["all tokens as stock"] = all(a["tokens"] == b["tokens"] for a, b in pairs)
        report["summary"]["hal"]["logprobs apart from stock, at most"] = max(apart)
    for way in ("load", "store"):
        if all(way in good.get(e, {}).get("copies", {}) for e in ("stock", "hal")):
            stock, ours = (good[e]["copies"][way]["GB/s"] for e in ("stock", "hal"))
            report[f"{way}, hal / stock"] = ours / stock
    engine_report.write(report, file)
    print(json.dumps({k: v for k, v in report.items() if k != "runs"}, indent=1))
    wrong = [e for e, s in report["summary"].items() if not all(v for v in s.values() if isinstance(v, bool))]
    return int(len(good) < len(engines) or bool(wrong))
