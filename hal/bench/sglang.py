"""Real SGLang, its attention and hal's in one run: ``hal bench engine sglang --shape llama-3.1-8b --json out.json``.

As `hal.bench.vllm`, whose shapes, weights and report these are: each implementation in a process of its own, its
outputs compared first, then decode by batch and the time to the first token by prompt length, CUDA graphs on. Decode is
what a long generation takes longer than a short one of the same prompts, which are cached by then. All of them import
SGLang at once; each then waits for its turn, and has the device alone.
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hal.bench import engine_report, vllm
from hal.bench.report import version
from hal.bench.shapes import SHAPES

SHORT = 8
"""Tokens of the short generation."""
ASKED, TURN, FOUND = "asked", "turn", "found.json"
"""Files of a run's folder: who gives it its turn, by its process; that it has come; what was found."""


@dataclass(frozen=True)
class Options:
    """What is run: as `hal.bench.vllm.Options`.

    Attributes:
        seconds: of an engine, from when it has started: SGLang's first start compiles its kernels for a minute or more.
        memory: SGLang's mem_fraction_static.
        settings: more of ``Engine(...)``.
        drafts: in a chain, by a draft model of the shape's first layer, verified in each step; 0: none.
        same: in decode each request makes one token again and again, its prompt's first: with random weights greedy
            tokens part soon, and what experts do depends on them.
    """

    shape: str = "llama-3.1-8b"
    dtype: str = "bfloat16"
    decode: Sequence[tuple[int, int]] = vllm.DECODE[:3]
    ttft: Sequence[int] = (4096, 32768)
    steps: int = 64
    seconds: float = 1e9
    memory: float = 0.85
    settings: dict[str, Any] = field(default_factory=dict)
    drafts: int = 0
    same: bool = False


# --- one implementation, in a process of its own ----------------------------------------------------


def register() -> None:
    """A plugin of SGLang's, in every process of the engine: weights as `hal.bench.vllm.random_weights` makes them, and
    no use of the device before its turn."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        ("model_loader.weight_utils.initialize_dummy_weights", vllm.random_weights, HookType.REPLACE),
        ("model_executor.model_runner.ModelRunner.init_torch_distributed", wait_for_turn, HookType.BEFORE),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, kind)


def wait_for_turn(runner: Any) -> None:
    """Where the model's folder says whom to wait for: its models are imported until then.

    Raises:
        ProcessLookupError: who gives turns is gone.
    """
    folder = Path(runner.server_args.model_path)
    if not (folder / ASKED).exists():
        return
    import sglang.srt.models.registry  # noqa: F401

    giver = int((folder / ASKED).read_text())
    while not (folder / TURN).exists():
        os.kill(giver, 0)
        time.sleep(0.02)


def child(attention: str, options: str, folder: str) -> None:
    """Runs one implementation by `Options` as JSON; writes what it found after every point."""
    given = Options(**json.loads(options))
    for found in measure(attention, given, folder):
        Path(folder, FOUND).write_text(json.dumps(found))


def measure(attention: str, options: Options, folder: str) -> Iterator[dict[str, Any]]:
    """What was found so far, after the start and after each point."""
    begin = time.perf_counter()
    found: dict[str, Any] = {"engine": attention, "decode": [], "ttft": [], "skipped": []}
    engine = _engine(attention, options, folder)
    turn = Path(folder, TURN)
    waited = turn.exists()  # since when it has been its turn
    found["start_s"] = round(time.time() - turn.stat().st_mtime if waited else time.perf_counter() - begin, 1)
    found["attention"] = engine.get_server_info()["attention_backend"]
    print(f"{attention}: started, {found['start_s']} s", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    yield found
    vocabulary = SHAPES[options.shape]["vocab_size"]

    def generate(prompts: list[list[int]], new: int, same: bool = False, **more: Any) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        greedy = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        sampling = [{**greedy, "logit_bias": {str(p[0]): 1e4}} for p in prompts] if same else greedy
        outs = engine.generate(input_ids=prompts, sampling_params=sampling, **more)
        return time.perf_counter() - start, outs

    def prompt(n: int, seed: int) -> list[int]:
        return engine_report.prompt(vocabulary, n, seed)

    points: list[tuple[str, str, Callable[[], Any]]] = []
    if not options.drafts:
        points.append(("logits", "logits", partial(_logits, generate, prompt)))
    for b, c in options.decode:
        points.append(
            (f"decode {b} x {c}", "decode", partial(_decode, generate, prompt, b, c, options.steps, options.same))
        )
    points += [(f"ttft {n}", "ttft", partial(_ttft, generate, prompt, n)) for n in options.ttft]
    calls = [(name, lambda kind=kind, run=run: found.setdefault(kind, []).extend(run())) for name, kind, run in points]
    for _ in engine_report.run_points(attention, calls, found, begin, options.seconds):
        yield found
    engine.shutdown()
    yield found


def _engine(attention: str, options: Options, folder: str) -> Any:
    """SGLang on a model of the shape; its processes find `register` in the folder."""
    from sglang import Engine

    shape = SHAPES[options.shape]
    engine_report.write_config(folder, options.shape, options.dtype)
    batch = max([b for b, _ in options.decode] + [8])
    longest = max([c + options.steps for _, c in options.decode] + [*options.ttft, 1024]) + 64
    tokens = max([b * (c + options.steps + 64) for b, c in options.decode] + [2 * longest])
    settings: dict[str, Any] = {
        "model_path": folder,
        "load_format": "dummy",
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "context_length": min(longest, shape["max_position_embeddings"]),
        "max_running_requests": batch,
        "max_total_tokens": tokens + 4096,
        "mem_fraction_static": options.memory,
        "random_seed": 0,
        "page_size": 1,
        "log_level": "warning",
        "attention_backend": attention,
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_bs_decode": engine_report.graph_sizes(batch),
        **(_drafts(options, folder) if options.drafts else {}),
        **options.settings,
    }
    return Engine(**settings)


def _drafts(options: Options, folder: str) -> dict[str, Any]:
    """Settings for speculation, with a draft model beside the model. Of random weights hardly a draft is taken."""
    path = Path(folder, "draft")
    path.mkdir()
    config = json.loads(Path(folder, "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(path),
        "speculative_eagle_topk": 1,
        "speculative_num_steps": options.drafts,
        "speculative_num_draft_tokens": options.drafts + 1,
    }


def _logits(generate: Any, prompt: Any) -> list[dict[str, Any]]:
    """The likeliest next tokens after prompts of several lengths, in a batch and each alone, and 16 greedy tokens."""
    prompts = [prompt(n, 100 + n) for n in engine_report.LENGTHS]
    more = {"return_logprob": True, "top_logprobs_num": 20}
    _, batched = generate(prompts, 16, **more)
    rows = []
    for p, b in zip(prompts, batched, strict=True):
        _, out = generate([p], 1, **more)
        first = [{str(t): x for x, t, _ in o["meta_info"]["output_top_logprobs"][0]} for o in (b, out[0])]
        rows.append({"length": len(p), "batched": first[0], "alone": first[1], "tokens": b["output_ids"]})
    return rows


def _decode(generate: Any, prompt: Any, batch: int, context: int, steps: int, same: bool) -> list[dict[str, Any]]:
    prompts = [prompt(context, 31 * context + i) for i in range(batch)]
    run = partial(generate, prompts, same=same)
    run(SHORT)  # prefills what the others find cached
    pairs = [(run(SHORT), run(SHORT + steps)) for _ in range(3)]
    each = [long - short for (short, _), (long, _) in pairs]
    counts = [_verified(longs) - _verified(shorts) for (_, shorts), (_, longs) in pairs]
    seconds = statistics.median(each)
    step = statistics.median(s / (n or steps) for s, n in zip(each, counts, strict=True))
    return [
        {
            "batch": batch,
            "context": context,
            "tokens_s": batch * steps / seconds,
            "all_s": each,
            "median_step_ms": step * 1e3,
            "steps": [n or steps for n in counts],
        }
    ]


def _verified(outs: list[Any]) -> int:
    """How many steps verified drafts."""
    return max(int(o["meta_info"].get("spec_verify_ct", 0)) for o in outs)


def _ttft(generate: Any, prompt: Any, n: int) -> list[dict[str, Any]]:
    # The first one is a warm-up; every prompt is another, so that none is cached.
    times = [generate([prompt(n, 7 * n + i)], 1)[0] * 1e3 for i in range(5 if n <= 8192 else 4)][1:]
    return [{"tokens": n, "ms": statistics.median(times), "least_ms": min(times), "all_ms": times}]


# --- all of them, and what comes of it --------------------------------------------------------------


def main(options: Options, attentions: Sequence[str], rounds: int, file: Path | None) -> int:
    """Runs the implementations in turn, prints the report and writes it to a file; 1 where one failed."""
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        given = [(a, "child", a, json.dumps(asdict(options))) for a in attentions] * rounds
        for a, child in [(a, stack.enter_context(Child(__name__, *args))) for a, *args in given]:
            runs.append({"engine": a, **child.run()})
            # What there is is kept, whatever ends the next one.
            report = _report(options, attentions, runs)
            engine_report.write(report, file)
    return engine_report.show(report)


def about(options: Options) -> dict[str, Any]:
    """What a report begins with."""
    return {
        **engine_report.about(options.shape, options.dtype, "sglang"),
        "settings": options.settings,
        "same_tokens": options.same,
        "drafts": options.drafts,
        "flashinfer": version("flashinfer-python") or "",
    }


def _report(options: Options, attentions: Sequence[str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs; how far each one's outputs are from hal's, and hal's speed over each one's."""
    found: dict[str, Any] = {**about(options), "runs": runs}
    of = {a: [r for r in runs if r["engine"] == a and r.get("decode")] for a in attentions}
    for a in attentions:
        if a != "hal" and of[a] and of.get("hal"):
            found[f"agreement with {a}"] = engine_report.agreement(of[a][0], of["hal"][0])
            found[f"hal over {a}"] = engine_report.ratios(of[a], of["hal"])
    return found


class Child:
    """A process with SGLang, which calls a function of a module with strings and its folder; it waits for its turn.

    Args:
        env: of its environment, what is other than here.
    """

    def __init__(self, module: str, function: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.made = tempfile.TemporaryDirectory(prefix="hal-sglang-")
        self.folder = Path(self.made.name)
        (self.folder / ASKED).write_text(str(os.getpid()))
        plugin = self.folder / "hal_bench_sglang-1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: hal-bench-sglang\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nhal_bench = {module}:register\n")
        path = os.pathsep.join(p for p in (self.made.name, os.environ.get("PYTHONPATH", "")) if p)
        program = f"import sys; from {module} import {function}\nfrom hal.engines.sglang import vision\n"
        program += f"vision.declare_operators()\nif __name__ == '__main__': {function}(*sys.argv[1:])\n"
        main_file = self.folder / "run.py"  # SGLang spawns, which wants a file
        main_file.write_text(program)
        self.process = subprocess.Popen(
            [sys.executable, str(main_file), *args, self.made.name],
            env={**os.environ, **(env or {}), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )

    def run(self) -> dict[str, Any]:
        """What it found, and `error` where it failed, when it has ended."""
        (self.folder / TURN).touch()
        code = self.process.wait()
        file = self.folder / FOUND
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return {**found, "error": f"exit status {code}: see stderr"} if code else found

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # whom it started finds no giver of turns
            self.process.wait()
        self.made.cleanup()
