"""The command line: ``hal`` and ``python -m hal``. Exit codes: 0 ok, 1 failed, 2 usage, 3 nothing ran."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hal import _complete, _progress
from hal._errors import ArgumentError, HalError, SelectionError
from hal._output import check_folder, data_output, fit_terminal
from hal._show import info_grids, info_head, info_notes
from hal._tools import manifest_rows, run_part, show_rows
from hal.bench.cli import app as bench

app = typer.Typer(
    name="hal",
    help="One contract per kernel for LLM serving engines. Start with [bold]hal info[/], then [bold]hal doctor[/].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
OK, FAILED, USAGE, NOTHING = 0, 1, 2, 3

AsJson = Annotated[bool, typer.Option("--json", help="Plain data, for programs.")]
Ops = Annotated[
    list[str] | None, typer.Option("--op", help="Only this op; repeat for several.", autocompletion=_complete.ops)
]


def main() -> None:
    """The entry point: a user's mistake is a line on stderr, never a traceback."""
    fit_terminal()
    try:
        app()
    except (SelectionError, ArgumentError) as e:
        _fail(str(e), USAGE)
    except HalError as e:
        _fail(str(e), FAILED)
    except BrokenPipeError:
        sys.exit(OK)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from hal import __version__

        print(f"hal {__version__}")
        raise typer.Exit(OK)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def info(as_json: AsJson = False) -> None:
    """What is here: backends with their states and what would mend them, the op x backend table, the environment."""
    import hal

    if as_json:
        with data_output() as out:
            print(json.dumps(hal.info(kernels=True), indent=2), file=out)
        return
    data = hal.info(kernels=True)
    console = Console()
    console.print(info_head(data), highlight=False)
    for grid in info_grids(data):
        console.print(grid.rich())
    for note in info_notes(data):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op, e.g. rope_kv_write.", autocompletion=_complete.ops)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="As the error texts show them: 'q=bf16[64,32,128]@cuda:0' 'interleaved=True'."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="As in the call: a backend, or the grammar of HAL_BACKEND.", autocompletion=_complete.backends
        ),
    ] = None,
) -> None:
    """Who would run a call, who would not, and why. Needs no device: arguments are described, not made.

    Arguments that are not given are as in a small typical call, in the sizes and on the device of those that are.

    Example: hal explain rope_kv_write 'q=bf16[64,32,192]@npu:0' --backend ascend
    """
    import hal
    from hal._notation import example_signature, parse_argument
    from hal.registry import current

    spec = current().spec(op)
    given = dict(parse_argument(op, a) for a in arguments or ())
    told = hal.explain(op, example_signature(spec, given), backend=backend)
    print(told)
    raise typer.Exit(OK if told.chosen else FAILED)


@app.command()
def doctor(
    op: Ops = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", help="Only these backends.", autocompletion=_complete.backends)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each backend's child process.")] = 120.0,
    as_json: AsJson = False,
    report: Annotated[
        bool, typer.Option("--report", help="All that one needs to know of this machine, into FILE; nothing private.")
    ] = False,
    file: Annotated[
        Path | None, typer.Argument(help="With --report: its JSON, and a text beside it. [hal-report.json]")
    ] = None,
) -> None:
    """Runs every op, small, on every ready backend, each in a child process, and says what it saw.

    With --report also versions, devices, streams, copies and times; each thing looked at has --timeout seconds.
    """
    from hal import _doctor, _report

    if file is not None and not report:
        raise ArgumentError("doctor", "FILE", "--report before it", str(file))
    if report:
        raise typer.Exit(_report.main(file or Path("hal-report.json"), op, backend, timeout))
    raise typer.Exit(_doctor.main(op, backend, timeout, as_json))


@app.command()
def warmup(
    device: Annotated[str, typer.Option(help="Whose backends to prepare.", autocompletion=_complete.devices)] = "cpu",
    op: Ops = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.", autocompletion=_complete.backends)] = None,
) -> None:
    """Compiles kernels ahead of the first request and shows how long each backend took."""
    import hal

    with _progress.show(1.0) as bar:
        seconds = hal.warmup(device, ops=op, backend=backend, progress=bar.at)
    for name, s in seconds.items():
        print(f"{name}: {s:.2f} s")
    if not seconds:
        print(f"no ready backend for {device} has a warm-up")
        raise typer.Exit(NOTHING)


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Your own prompt; repeat for several at once.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 48,
    dtype: Annotated[str, typer.Option(help="float32 (tokens equal transformers') or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda.")] = "cpu",
    random_weights: Annotated[bool, typer.Option(help="A Llama of the same shape with random weights.")] = False,
    check: Annotated[bool, typer.Option(help="Compare the tokens with transformers' own generate.")] = True,
    bench: Annotated[
        bool,
        typer.Option("--bench", help="Instead: tokens a second beside transformers' generate, one prompt and eight."),
    ] = False,
) -> None:
    """Serves a real language model through hal's ops: several prompts at once, streamed.

    HAL_BACKEND picks the backend.
    """
    raise typer.Exit(
        run_part(
            "hal.demo.cli",
            "main",
            "hal demo",
            "demo",
            prompts=prompt,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            random_weights=random_weights,
            check=check,
            bench=bench,
        )
    )


@app.command()
def conformance(
    backend: Annotated[
        str | None,
        typer.Argument(
            help="A backend's name, or reference. Not needed with --verify.", autocompletion=_complete.backends
        ),
    ] = None,
    op: Ops = None,
    lane: Annotated[
        str | None, typer.Option(help="device, interpreter or lowered.", autocompletion=_complete.lanes)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where, if not the lane's first: cuda:1.", autocompletion=_complete.devices)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A folder for report.json, report.xml (JUnit), report.html.")
    ] = None,
    certify: Annotated[bool, typer.Option(help="Fixed seeds, all ops; exit code 1 unless certified.")] = False,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers a backend which is not packaged yet.")
    ] = None,
    verify: Annotated[Path | None, typer.Option(help="A report.json to check instead of a run.")] = None,
    rerun: Annotated[int, typer.Option(help="With --verify: how many of its cases to run again.")] = 0,
    against: Annotated[
        Path | None,
        typer.Option(help="A report.json: where it is of this very code, some of its cases run again instead of all."),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="With --against: one in so many cases.")] = 10,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds in which a call has to end; then it hangs. Default: 120.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that run cases at a time.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="What fresh inputs, and the cases to run again, are drawn from; none: anew.")
    ] = None,
) -> None:
    """Judges a backend by the contracts: value, memory, streams, threads. In a child that decides nothing else."""
    if report is not None and verify is None:
        check_folder("conformance", "--report", report)
    if device is not None:
        from hal._devices import parse_device

        parse_device("conformance", "--device", device)
    if backend is not None and ">" in backend:
        raise SelectionError(f"hal: conformance: {backend!r}: expected one backend's name")
    if backend is not None:
        _load_only(backend, imports)
    code = run_part(
        "hal.conformance", "main", "hal conformance", "conformance",
        backend, op, lane, _path(report), certify, imports or (), device=device, verify=_path(verify), rerun=rerun,
        against=_path(against), sample=sample, timeout=timeout, jobs=jobs, seed=seed,
    )  # fmt: skip
    raise typer.Exit(code)


def _load_only(backend: str, imports: list[str] | None) -> None:
    """Leaves every plugin but the judged one's unloaded, unless HAL_PLUGINS says which."""
    from hal.registry._points import BUILTIN, entry_points

    name, known = backend.partition("/")[0], {p.name for p in entry_points()}
    if not os.environ.get("HAL_PLUGINS", "").strip() and (imports or name in known or name == "reference"):
        os.environ["HAL_PLUGINS"] = ",".join(dict.fromkeys([*BUILTIN, *({name} & known)]))


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(help="The backend's name, as in HAL_BACKEND: acme.")],
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="An op to begin with; repeat for several. Default: get_last_loc.", autocompletion=_complete.ops
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="The device type whose tensors it takes.", autocompletion=_complete.devices)
    ] = "cpu",
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where: empty, or not there. Default: hal-backend-NAME.")
    ] = None,
) -> None:
    """Writes a backend to begin with: package, manifest, a stub of each op, its test, a CI workflow."""
    from hal import _scaffold

    ops = op or ["get_last_loc"]
    root, files = _scaffold.make(name, ops, device, folder)
    print(_scaffold.next_steps(root, name, files, ops))


@app.command()
def inspect(
    backend: Annotated[str, typer.Argument(help="A backend, e.g. cuda or ascend.", autocompletion=_complete.backends)],
    kernel: Annotated[str | None, typer.Argument(help="One op; none: all.", autocompletion=_complete.ops)] = None,
    as_json: AsJson = False,
) -> None:
    """What kernels compile to: registers and spills, or gathers, DMA and buffer use. 1 where a verdict is bad."""
    with data_output() if as_json else nullcontext(sys.stdout) as out:
        rows = manifest_rows(backend, "inspect", kernel)
        show_rows(rows, as_json, out)
    bad = [r for r in rows if r.get("verdict", "ok") != "ok"]
    raise typer.Exit(NOTHING if not rows else FAILED if bad else OK)


@app.command()
def tune(
    backend: Annotated[str, typer.Argument(help="A ready backend.", autocompletion=_complete.backends)] = "cuda",
) -> None:
    """Measures this machine once and keeps the cost table that method='auto' reads."""
    show_rows(manifest_rows(backend, "tune"), False, sys.stdout)


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


if __name__ == "__main__":
    main()
