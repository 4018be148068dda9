"""``hal bench``: the tables of a device, and what else is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hal import _complete
from hal._errors import ArgumentError
from hal._output import check_folder
from hal._tools import run_part

TABLES = "tables"
AsJson = Annotated[bool, typer.Option("--json", help="Plain data, for programs.")]


class WithTables(TyperGroup):
    """A group whose first word may be a table instead of a command: ``hal bench OP`` is ``hal bench tables OP``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = [TABLES, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=WithTables,
    help="Times ours beside its peers. [bold]hal bench OP[/] is [bold]hal bench tables OP[/]: its -h has the options.",
    rich_markup_mode="rich",
)


@app.command(TABLES)
def tables(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP", help="Ops, or other tables of the device; none: all.", autocompletion=_complete.tables
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; ascend with --model.", autocompletion=_complete.devices)
    ] = "cpu",
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="The roofline: a PNG, PDF or SVG. Needs matplotlib.")] = None,
    save: Annotated[Path | None, typer.Option(help="A folder for the run's JSON.")] = None,
    quick: Annotated[bool, typer.Option(help="Few rounds, to see that it runs: no numbers to quote.")] = False,
    model: Annotated[
        bool, typer.Option("--model", help="With --device ascend: an estimate from lowered code, no timing.")
    ] = False,
) -> None:
    """Times ours beside its peers, interleaved in one run, outputs checked first; shows medians and ratios."""
    if model or device == "ascend":
        if not (model and device == "ascend"):
            raise ArgumentError("bench", "--model", "--device ascend --model", f"--device {device}{' --model' * model}")
        _leave("hal.bench.ascend.model", "main", names or (), as_json)
    if save is not None:
        check_folder("bench", "--save", save)
    _leave("hal.bench", "main", names or (), device, as_json, plot and str(plot), save and str(save), quick)


@app.command()
def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="decode_attention, extend_attention; none: both.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or one of several: cuda:1.")] = "cuda",
    as_json: AsJson = False,
    save: Annotated[Path | None, typer.Option(help="A folder for the run's JSON.")] = None,
    quick: Annotated[bool, typer.Option(help="Few rounds, to see that it runs: no numbers to quote.")] = False,
) -> None:
    """Attention as real models have it, on a GPU: their heads, sliding windows and caps, beside FA3 and FlashInfer."""
    if save is not None:
        check_folder("bench", "--save", save)
    _leave("hal.bench", "main", names or (), device, as_json, None, save and str(save), quick, True)


@app.command()
def draw(
    run: Annotated[Path, typer.Argument(help="A run's JSON, as --save writes it.")],
    file: Annotated[Path, typer.Argument(help="The picture: .png, .pdf or .svg.")],
) -> None:
    """Draws the roofline of a run that was saved on another machine. Needs matplotlib."""
    from hal.bench.plot import draw as draw_run

    try:
        data = json.loads(run.read_text(encoding="utf-8"))
        data["machine"], data["rows"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ArgumentError("bench", "RUN", "the JSON of a run", f"{run}: {e!r}") from None
    draw_run(data, str(file))


@app.command()
def sanitize() -> None:
    """compute-sanitizer over the contract's samples on a GPU; first it must see a planted access past the end."""
    _leave("hal.bench.sanitize", "main")


@app.command()
def scale(
    requests: Annotated[int, typer.Option(help="How many arrive.")] = 60_000,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 1500.0,
    seed: Annotated[int, typer.Option(help="What they are drawn from.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draws the simulation. Needs matplotlib.")] = None,
) -> None:
    """When moving a prompt's KV beats computing it again: a model, and a simulation of 1,000 hosts that decode."""
    _leave("hal.bench.scale", "main", requests, rate, seed, plot)


@app.command()
def link(
    device: Annotated[str, typer.Option(help="cpu, or cuda: from one GPU to another where there are two.")] = "cpu",
    to_device: Annotated[str, typer.Option(help="The receiver's, where it is another: cpu or cuda.")] = "",
    tokens: Annotated[int, typer.Option(help="Of a request.")] = 512,
    layers: Annotated[int, typer.Option(help="Of the pools: rows of 8 heads of 128 in bf16.")] = 32,
    rounds: Annotated[int, typer.Option(help="Whose median is shown.")] = 9,
    as_json: AsJson = False,
) -> None:
    """A link between two processes beside NIXL alone with the same bytes, in one run. Needs the extra nixl."""
    for option, value, expected in (
        ("--device", device, device in ("cpu", "cuda")),
        ("--to-device", to_device, to_device in ("", "cpu", "cuda")),
        ("--tokens", tokens, tokens > 0 and tokens % 16 == 0),
        ("--layers", layers, layers > 0),
        ("--rounds", rounds, rounds > 0),
    ):
        if not expected:
            named = dict.fromkeys(("--device", "--to-device"), "cpu or cuda") | {"--tokens": "a multiple of 16, > 0"}
            what = named.get(option, "an int > 0")
            raise ArgumentError("bench link", option, what, repr(value))
    raise typer.Exit(
        run_part("hal.bench.link", "main", "hal bench link", "nixl", device, to_device, tokens, layers, rounds, as_json)
    )


@app.command()
def offload(
    layers: Annotated[int, typer.Option(help="Of the model: rows of 8 heads of 128 in bf16, k and v.")] = 32,
    tokens: Annotated[int, typer.Option(help="Moved at a time.")] = 16384,
    engine: Annotated[
        int, typer.Option(help="Tokens of a prompt that whole engines compute and get back; 0: none.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """KV offloading's copies on a CUDA device beside vLLM's own, in vLLM's environment."""
    for option, value in (("--layers", layers), ("--tokens", tokens // 64)):
        if value <= 0:
            raise ArgumentError("bench offload", option, "an int > 0 (tokens: >= 64)", repr(value))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # which goes to stdout
    raise typer.Exit(
        run_part("hal.bench.offload", "main", "hal bench offload", "vllm", layers, tokens, engine, as_json)
    )


@app.command()
def attention(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option(help="Few rounds and cases: no numbers to quote.")] = False,
) -> None:
    """Decode and prompts on a CPU beside vLLM's own kernels, in vLLM's environment; threads: OMP_NUM_THREADS."""
    _leave("hal.bench.cpu_vllm", "main", as_json, quick)


@app.command()
def engine(
    name: Annotated[str, typer.Argument(help="The engine: vllm or sglang.")],
    shape: Annotated[
        str, typer.Option(help="llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b, deepseek-v2-lite or tiny.")
    ] = "llama-3.1-8b",
    dtype: Annotated[str, typer.Option(help="Of weights and cache.")] = "bfloat16",
    decode: Annotated[
        str, typer.Option(help="Batch x context of each point.")
    ] = "1x1024,32x1024,256x1024,32x8192,1x8192",
    ttft: Annotated[str, typer.Option(help="Prompt lengths of the time to the first token.")] = "4096,32768",
    throughput: Annotated[int, typer.Option(help="Requests at once; 0: not measured.")] = 256,
    steps: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 128,
    seconds: Annotated[float, typer.Option(help="Of an engine: no point begins after it.")] = 1e9,
    memory: Annotated[float, typer.Option(help="vLLM's gpu_memory_utilization, SGLang's mem_fraction_static.")] = 0.85,
    profile: Annotated[
        str, typer.Option(help="vllm: profiled by kernel: a prompt's length, a batch x context: 32768,128x1024.")
    ] = "",
    settings: Annotated[
        str,
        typer.Option("--vllm", "--sglang", help='More of the engine\'s settings, as JSON: {"kv_cache_dtype": "fp8"}.'),
    ] = "{}",
    report: Annotated[Path | None, typer.Option("--json", help="A file for the report.")] = None,
    engines: Annotated[
        str,
        typer.Option(
            help="Which, in this order: stock,hal for vllm; hal,triton,flashinfer for sglang, with --returned "
            "without,stock,hal."
        ),
    ] = "",
    returned: Annotated[
        int, typer.Option(help="sglang: instead, tokens of a prompt that HiCache has leave the device and return.")
    ] = 0,
    rounds: Annotated[int, typer.Option(help="How often each runs.")] = 1,
    speculative: Annotated[
        int, typer.Option(help="sglang: drafts a step, in a chain, by a draft model of one layer; 0: none.")
    ] = 0,
    same: Annotated[
        bool, typer.Option("--same-tokens", help="sglang: decode repeats a token of each prompt, alike in all engines.")
    ] = False,
    together: Annotated[
        bool, typer.Option(help="vllm: start both at once and take turns; --vllm kv_cache_memory_bytes shares.")
    ] = False,
) -> None:
    """A real engine, stock and on hal, in one run: agreement of logits, then tokens a second and first tokens."""
    from hal.bench import sglang, vllm
    from hal.bench.shapes import SHAPES

    if name not in ("vllm", "sglang"):
        raise ArgumentError("bench engine", "NAME", "vllm or sglang", repr(name))
    if shape not in SHAPES:
        raise ArgumentError("bench engine", "--shape", ", ".join(SHAPES), repr(shape))
    chosen = (engines or {"vllm": "stock,hal", "sglang": "hal,triton,flashinfer"}[name]).split(",")
    if name == "sglang":
        own = sglang.Options(
            shape,
            dtype,
            _read("--decode", decode, _pairs),
            _read("--ttft", ttft, _numbers),
            steps,
            seconds,
            memory,
            _read("--sglang", settings, json.loads),
            speculative,
            same,
        )
        if returned:
            which = tuple(engines.split(",")) if engines else ("without", "stock", "hal")
            _leave("hal.bench.sglang_hicache", "main", own, which, returned, report)
        _leave("hal.bench.sglang", "main", own, chosen, rounds, report)
    options = vllm.Options(
        shape,
        dtype,
        _read("--decode", decode, _pairs),
        _read("--ttft", ttft, _numbers),
        throughput,
        steps,
        seconds,
        memory,
        _read("--vllm", settings, json.loads),
        _read("--profile", profile, _profiles),
    )
    _leave("hal.bench.vllm", "main", options, chosen, rounds, report, together)


def _pairs(text: str) -> list[tuple[int, int]]:
    return [(int(b), int(c)) for b, c in (p.split("x") for p in text.split(",") if p)]


def _profiles(text: str) -> list[tuple[int, int]]:
    return _pairs(",".join(p if "x" in p else f"0x{p}" for p in text.split(",") if p))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _read(option: str, text: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError:
        expected = {
            "--decode": "such as 1x1024,32x1024",
            "--ttft": "such as 4096,32768",
            "--profile": "such as 32768,128x1024",
        }.get(option, "JSON")
        raise ArgumentError("bench engine", option, expected, repr(text)) from None


def _leave(module: str, function: str, *args: Any) -> None:
    raise typer.Exit(run_part(module, function, "hal bench", "cpu", *args))
