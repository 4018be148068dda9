"""`hal demo`: a real language model served through hal's ops, its tokens checked against transformers'."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.markup import escape

import hal
from hal._errors import ArgumentError
from hal.demo import bench as benching
from hal.demo.check import compare
from hal.demo.engine import OPS, Engine, Request
from hal.demo.meter import Meter
from hal.demo.model import Llama
from hal.demo.screen import Answer, Screen, benched, progress
from hal.demo.weights import STAGES, WeightsMissing, load
from hal.registry import _scope, _select, current, table

PROMPTS = (
    "Why is the sky blue?",
    "Give me three tips for learning to play the piano.",
    "Write a short poem about the sea.",
    "What is the capital of France?",
)
"""The last arrives late and is urgent: one of the others must make room."""
MORE_PROMPTS = (
    "How do bees make honey?",
    "Explain in two sentences what a prime number is, and name the first five of them.",
    "What should I pack for a week in the mountains in autumn?",
    "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
)
"""With the others, the eight of `--bench`."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(
    prompts: Sequence[str] | None = None,
    *,
    max_tokens: int = 48,
    dtype: str = "float32",
    device: str = "cpu",
    random_weights: bool = False,
    check: bool = True,
    bench: bool = False,
) -> int:
    """Serves the prompts at once: all but the last from the start, the last in the middle, before the others.

    Args:
        prompts: the user's; None or empty for the demo's own.
        max_tokens: to generate for each.
        dtype: float32, bfloat16 or float16.
        device: cpu, or an accelerator that torch sees.
        random_weights: a Llama of the same shape with random weights.
        check: compare with transformers' greedy generate; in float32, fail where a token differs.
        bench: instead, measure tokens a second beside transformers' generate: one prompt, and all of them.

    Returns:
        An exit code: 0, 1 where a token differs in float32, 3 where there are no weights to run.

    Raises:
        ArgumentError: an argument makes no sense.
    """
    console = Console()
    if max_tokens < 1:
        raise _bad("--max-tokens", "at least 1", str(max_tokens))
    if dtype not in _DTYPES:
        raise _bad("--dtype", "one of " + ", ".join(_DTYPES), repr(dtype))
    where = _device(device)
    # TF32 rounds a float32 product to 10 bits, and no two kernels alike.
    torch.set_float32_matmul_precision("highest")

    with progress(console) as bar:
        task = bar.add_task("loading", total=STAGES)

        def stage(what: str) -> None:
            bar.update(task, description=f"loading: {what}", completed=stages.pop())

        stages = list(range(STAGES))[::-1]
        begin = time.perf_counter()
        try:
            loaded = load(random_weights, _DTYPES[dtype], where, stage)
        except WeightsMissing as e:
            console.print(escape(str(e)))
            return 3
        took = time.perf_counter() - begin

    asked = list(prompts or PROMPTS + MORE_PROMPTS * bench)
    meter = Meter(where)
    model = Llama(loaded.model.config, loaded.model.state_dict(), meter)
    chosen = os.environ.get("HAL_BACKEND") or "auto"
    console.print(
        f"[bold]{loaded.name}[/], {dtype} on {where}, loaded in {took:.1f} s; backend [bold]{escape(chosen)}[/], "
        f"{torch.get_num_threads()} threads",
        highlight=False,
    )

    encoded = [loaded.encode(p) for p in asked]
    for prompt, tokens in zip(asked, encoded, strict=True):
        if len(tokens) + max_tokens > model.max_positions:
            most = f"at most {model.max_positions} tokens with --max-tokens {max_tokens}"
            raise _bad("--prompt", most, f"{len(tokens) + max_tokens}: {prompt[:40]!r}...")
    with _reference_for_what_lacks(console):
        if bench:
            return _bench(console, model, loaded.model, encoded, max_tokens, exact=dtype == "float32")
        engine = benching.engine_for(model, encoded, max_tokens, late=1, share=True)
        answers = [Answer(i + 1, p) for i, p in enumerate(asked)]
        screen = Screen(console, answers, loaded.decode)
        begin = time.perf_counter()
        screen.serve(engine, Arrivals(engine, answers, encoded, max_tokens))
        took = time.perf_counter() - begin
    requests = [a.request for a in answers if a.request is not None]

    failed = False
    if check:
        failed = _check(console, screen, loaded.model, requests, exact=dtype == "float32")
    screen.used(meter.uses)
    count = sum(len(r.output) for r in requests)
    ops = sum(u.seconds for u in meter.uses)
    console.print(
        f"{count} tokens in {engine.steps} steps, {took:.2f} s ({count / took:.1f} tokens/s), "
        f"{ops:.2f} s of it in hal's ops",
        highlight=False,
    )
    if engine.graphs is not None:
        console.print(f"{engine.graphs.replayed} of the steps were replays of captured graphs", highlight=False)
        if engine.graphs.why_not:
            console.print(f"[yellow]no graphs:[/] {escape(engine.graphs.why_not)}", highlight=False)
    return 1 if failed else 0


@contextmanager
def _reference_for_what_lacks(console: Console) -> Iterator[None]:
    """Where the user names a backend that lacks some of the engine's ops, names reference for those, and says so."""
    in_force, rows = current(), table()
    levels = in_force.levels(None, _scope.texts())
    named = {op: _select.decide(levels, op) for op in OPS}

    def lacks(op: str) -> bool:
        return all(lacks_it(link, op) for link in named[op][0].split(">"))

    def lacks_it(name: str, op: str) -> bool:
        backend, _, which = name.partition("/")
        if which or backend == "auto":
            return False
        if backend == "reference" or not in_force.entries[backend].state(in_force.lane).ready:
            return False  # not its ops are what lacks: the first call says what does
        # Those that a bare name takes, in the lane that runs.
        impls = [i for i, _ in rows[op][backend] if not i.named and (not i.lanes or in_force.lane in i.lanes)]
        return not impls

    lacking = [op for op in OPS if lacks(op)]
    if not lacking:
        yield
        return
    names = ", ".join(sorted({named[op][0] for op in lacking}))
    instead = ",".join(f"{op}=reference" for op in lacking)
    console.print(
        f"[yellow]{escape(names)} has no {', '.join(lacking)} here: these run on reference, as {named[lacking[0]][1]} "
        f"with ,{instead} would say[/]",
        highlight=False,
    )
    with hal.use(instead):
        yield


def _bench(
    console: Console, model: Llama, theirs: object, encoded: Sequence[list[int]], max_tokens: int, *, exact: bool
) -> int:
    """Shows tokens a second beside transformers'; fails where one prompt's tokens differ in float32."""
    model.ops = benching.bound(model)
    cases = 2 if len(encoded) > 1 else 1
    with progress(console) as bar:
        task = bar.add_task("the engine and transformers in turn", total=cases * (benching.ROUNDS + 1))
        rows = benching.run(model, theirs, encoded, max_tokens, benching.ROUNDS, tell=lambda: bar.advance(task))
    benched(console, rows)
    return 1 if exact and not rows[0].equal else 0


def _device(name: str) -> torch.device:
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    known = ["cpu"] if there is None else ["cpu", there.type]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.accelerator.device_count() if there is not None and device.type == there.type else 1
    if device.type not in known or (device.index or 0) >= count:
        raise _bad("--device", "a device that is here: " + ", ".join(known), repr(name))
    return device


class Arrivals:
    """Lets the prompts arrive between steps: all but the last at once, the last one late and urgent.

    A single prompt has nobody to make room for; it is pre-empted all the same.
    """

    def __init__(
        self, engine: Engine, answers: Sequence[Answer], encoded: Sequence[list[int]], max_tokens: int
    ) -> None:
        self.engine, self.answers, self.encoded, self.max_tokens = engine, answers, encoded, max_tokens
        self.late = min(4, max_tokens // 2)

    def __call__(self) -> None:
        last, quiet = len(self.answers) - 1, not self.engine.live
        for i, answer in enumerate(self.answers):
            urgent = i == last > 0
            due = not urgent or self.engine.steps >= self.late or (quiet and self.engine.steps > 0)
            if answer.request is None and due:
                answer.request = self.engine.add(self.encoded[i], self.max_tokens, priority=int(urgent))
        only = self.answers[0].request
        if last == 0 and only is not None and only.row is not None and self.engine.steps == self.late:
            self.engine.preempt(only)


def _check(console: Console, screen: Screen, model: object, requests: Sequence[Request], *, exact: bool) -> bool:
    """Shows the comparison with transformers; whether it failed."""
    with progress(console) as bar:
        found = [compare(model, r) for r in bar.track(requests, description="transformers, prompt by prompt")]
    screen.checked(found)
    if all(c.equal for c in found):
        console.print("[green]Every token of every prompt equals transformers'.[/]")
    elif exact:
        console.print("[red]The tokens differ from transformers' in float32.[/]")
    else:
        console.print("16 bits: transformers differs from itself between batch sizes; see float32.")
    return exact and not all(c.equal for c in found)


def _bad(argument: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError("demo", argument, expected, got)
