"""The command line: ``hal`` and ``python -m hal``. Exit codes: 0 ok, 1 failed, 2 usage, 3 nothing ran."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from hal._errors import ArgumentError, HalError, SelectionError
from hal._output import check_folder, data_output, fit_terminal

app = typer.Typer(
    name="hal",
    help="One contract per kernel for LLM serving engines. Start with [bold]hal info[/], then [bold]hal doctor[/].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OK, FAILED, USAGE, NOTHING = 0, 1, 2, 3
_STYLE = {
    "ready": "green",
    "absent": "yellow",
    "unavailable": "yellow",
    "broken": "red",
    "incompatible": "red",
    "on": "green",
    "off": "dim",
    "error": "red",
}


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
def info(as_json: Annotated[bool, typer.Option("--json", help="Plain data, for programs.")] = False) -> None:
    """What is here: backends with their states and what would mend them, the op x backend table, the environment."""
    import hal

    if as_json:
        with data_output() as out:
            print(json.dumps(hal.info(kernels=True), indent=2), file=out)
        return
    data = hal.info(kernels=True)
    console = Console()
    console.print(
        f"hal {data['hal']}, torch {data['torch']}, python {data['python']}, lane {data['lane']}",
        highlight=False,
    )
    backends = Table(
        "backend", "from", "lane", "state", "why, and what would help", title="Backends", title_justify="left"
    )
    backends.add_row(
        "reference", "built-in", "device", "[green]ready[/]", "plain torch on any device; always there"
    )
    for b in data["backends"]:
        for lane, s in b["lanes"].items():
            why = s["reason"] + (f" — {s['remedy']}" if s["remedy"] else "")
            backends.add_row(
                b["name"], b["distribution"], lane, f"[{_STYLE[s['state']]}]{s['state']}[/]", _escape(why)
            )
    console.print(backends)
    names = ["reference", *(b["name"] for b in data["backends"])]
    ops = Table("op", *names, title="Ops", title_justify="left")
    for op, row in data["ops"].items():
        ops.add_row(op, *("\n".join(row[n]) for n in names))
    console.print(ops)
    engines = Table(
        "engine", "installed", "tested with", "state", "why", title="Engines", title_justify="left"
    )
    for e in data["engines"]:
        has = f"{e['distribution']} {e['version']}".strip() or "no"
        engines.add_row(
            e["name"], has, e["tested"], f"[{_STYLE[e['state']]}]{e['state']}[/]", _escape(e["reason"])
        )
    console.print(engines)
    environment = Table("variable", "value", "source", title="Environment", title_justify="left")
    for v in data["environment"]:
        environment.add_row(v["name"], _escape(v["value"]), v["source"])
    for name in data["foreign_variables"]:
        environment.add_row(name, "", "not ours: ignored")
    console.print(environment)
    for reason in dict.fromkeys(f["reason"] for f in data["failures"]):
        which = [f"{f['op']}={f['backend']}" for f in data["failures"] if f["reason"] == reason]
        console.print(f"broken: {', '.join(which)}: {reason}", markup=False, highlight=False, soft_wrap=True)
    for b in data["backends"]:
        for what, said in b["status"].items():
            console.print(f"{b['name']}: {what}: {said}", markup=False)
    if data["blocked_plugins"]:
        console.print(f"kept from loading by HAL_PLUGINS: {', '.join(data['blocked_plugins'])}")


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op, e.g. rope_kv_write.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="As the error texts show them: 'q=bf16[64,32,128]@cuda:0' 'interleaved=True'."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="As in the call: a backend, or the grammar of HAL_BACKEND.")
    ] = None,
) -> None:
    """Who would run a call, who would not, and why. Needs no device: arguments are described, not made.

    Arguments that are not given are as in a small typical call, in the sizes and on the device of those that are.

    Example: hal explain rope_kv_write 'q=bf16[64,32,192]@npu:0' --backend ascend
    """
    import hal
    from hal._notation import example_signature, parse_argument
    from hal.registry._table import live

    spec = live.current().spec(op)
    given = dict(parse_argument(op, a) for a in arguments or ())
    told = hal.explain(op, example_signature(spec, given), backend=backend)
    print(told)
    raise typer.Exit(OK if told.chosen else FAILED)


@app.command()
def doctor(
    op: Annotated[list[str] | None, typer.Option("--op", help="Only these ops.")] = None,
    backend: Annotated[list[str] | None, typer.Option("--backend", help="Only these backends.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each backend's child process.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data, for programs.")] = False,
) -> None:
    """Runs every op, small, on every ready backend, each in a child process, and says what it saw."""
    from hal import _doctor

    raise typer.Exit(_doctor.main(op, backend, timeout, as_json))


@app.command()
def warmup(
    device: Annotated[str, typer.Option(help="Whose backends to prepare.")] = "cpu",
    op: Annotated[list[str] | None, typer.Option("--op", help="Only these ops.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
) -> None:
    """Compiles kernels ahead of the first request and shows how long each backend took."""
    import hal

    seconds = hal.warmup(device, ops=op, backend=backend)
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
    random_weights: Annotated[
        bool, typer.Option(help="A Llama of the same shape with random weights.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Compare the tokens with transformers' own generate.")] = True,
    bench: Annotated[
        bool,
        typer.Option(
            "--bench", help="Instead: tokens a second beside transformers' generate, one prompt and eight."
        ),
    ] = False,
) -> None:
    """Serves a real language model through hal's ops: several prompts at once, streamed.

    HAL_BACKEND picks the backend.
    """
    raise typer.Exit(
        _call(
            "hal.demo.cli", "main", "hal demo", "demo",
            prompts=prompt, max_tokens=max_tokens, dtype=dtype, device=device, random_weights=random_weights,
            check=check, bench=bench,
        )
    )  # fmt: skip


@app.command()
def conformance(
    backend: Annotated[
        str | None, typer.Argument(help="A backend's name, or reference. Not needed with --verify.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; repeat for several.")] = None,
    lane: Annotated[str | None, typer.Option(help="device, interpreter or lowered.")] = None,
    device: Annotated[str | None, typer.Option(help="Where, if not the lane's first: cuda:1.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="A folder for report.json, report.xml (JUnit), report.html.")
    ] = None,
    certify: Annotated[
        bool, typer.Option(help="Fixed seeds, all ops; exit code 1 unless certified.")
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module that registers a backend which is not packaged yet."),
    ] = None,
    verify: Annotated[Path | None, typer.Option(help="A report.json to check instead of a run.")] = None,
    rerun: Annotated[int, typer.Option(help="With --verify: how many of its cases to run again.")] = 0,
    golden: Annotated[
        Path | None, typer.Option(help="Also replay the outputs recorded on another machine in this folder.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds in which a call has to end; then it hangs. Default: 120.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that run cases at a time.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="What fresh inputs are drawn from, as a report says; none: anew.")
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
    code = _call(
        "hal.conformance", "main", "hal conformance", "conformance",
        backend, op, lane, _path(report), certify, imports or (), device=device, verify=_path(verify), rerun=rerun,
        timeout=timeout, jobs=jobs, seed=seed,
    )  # fmt: skip
    if golden is not None and backend is not None:
        codes = code, _replay(golden, backend, device)
        code = FAILED if FAILED in codes else max(codes)
    raise typer.Exit(code)


def _load_only(backend: str, imports: list[str] | None) -> None:
    """Leaves every plugin but the judged one's unloaded, unless HAL_PLUGINS says which."""
    from hal.registry._points import BUILTIN, entry_points

    name, known = backend.partition("/")[0], {p.name for p in entry_points()}
    if not os.environ.get("HAL_PLUGINS", "").strip() and (imports or name in known or name == "reference"):
        os.environ["HAL_PLUGINS"] = ",".join(dict.fromkeys([*BUILTIN, *({name} & known)]))


def _replay(folder: Path, backend: str, device: str | None) -> int:
    """Golden cases: how many give what was recorded; those that the backend does not do are not run."""
    from hal import golden
    from hal.registry._table import live

    table = live.current()
    entry = table.entries.get(backend)
    where = device or (
        entry.manifest.lanes.get(table.lane, ("cpu",))[0] if entry and entry.manifest else "cpu"
    )
    outcomes = golden.replay(folder, backend, where)
    for o in outcomes:
        if not o.passed:
            print(f"golden {o.op} {o.case}: {'' if o.ran else 'not run: '}{o.detail}")
    print(f"golden: {golden.summary(outcomes)}")
    return golden.exit_code(outcomes)


@app.command()
def bench(
    op: Annotated[
        str | None, typer.Argument(help="An op, or another table of the device; none: all of them.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Plain data, for programs.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="The roofline: a PNG (cpu; needs matplotlib) or an SVG (cuda).")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="A folder for the run's JSON.")] = None,
    quick: Annotated[
        bool, typer.Option(help="Few rounds, to see that it runs: no numbers to quote.")
    ] = False,
) -> None:
    """Times ours beside its peers, interleaved in one run, outputs checked first; shows medians and ratios."""
    if save is not None:
        check_folder("bench", "--save", save)
    raise typer.Exit(
        _call("hal.bench", "main", "hal bench", "cpu", op, device, as_json, _path(plot), _path(save), quick)
    )


@app.command()
def inspect(
    backend: Annotated[str, typer.Argument(help="A backend, e.g. cuda or ascend.")],
    kernel: Annotated[str | None, typer.Argument(help="One op; none: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data, for programs.")] = False,
) -> None:
    """What kernels compile to: registers and spills, or gathers, DMA and buffer use. 1 where a verdict is bad."""
    with data_output() if as_json else nullcontext(sys.stdout) as out:
        rows = _manifest_call(backend, "inspect", kernel)
        _show_rows(rows, as_json, out)
    bad = [r for r in rows if r.get("verdict", "ok") != "ok"]
    raise typer.Exit(NOTHING if not rows else FAILED if bad else OK)


@app.command()
def tune(backend: Annotated[str, typer.Argument(help="A ready backend.")] = "cuda") -> None:
    """Measures this machine once and keeps the cost table that method='auto' reads."""
    _show_rows(_manifest_call(backend, "tune"), False, sys.stdout)


def _manifest_call(backend: str, what: str, *args: Any) -> list[dict[str, Any]]:
    """The rows of a backend's own tool, which its manifest names."""
    from hal._errors import NoBackendError
    from hal.registry._discover import resolve
    from hal.registry._isolate import demand
    from hal.registry._table import live

    table = live.current()
    table.parse(backend, "BACKEND={}")
    entry = table.entries.get(backend)
    tool = getattr(entry.manifest, what, None) if entry else None
    if entry is None or tool is None:
        have = [n for n, e in table.entries.items() if getattr(e.manifest, what, None)]
        raise SelectionError(
            f"hal: {what}: {backend} has no such tool; these have: {', '.join(have) or 'none'}"
        )
    states = [entry.state(lane) for lane in entry.lanes]
    # A compiler needs no device: unavailable is no obstacle to looking at what it makes.
    if (what == "tune" and not entry.state().ready) or all(
        s.state in ("absent", "broken", "incompatible") for s in states
    ):
        raise NoBackendError(f"hal: {what}: {backend} is {entry.state()}")
    return demand(f"{what}: {backend}", lambda: list(resolve(tool)(*args)))


def _show_rows(rows: list[dict[str, Any]], as_json: bool, out: TextIO) -> None:
    if as_json:
        print(json.dumps(rows, indent=1, default=str), file=out)
        return
    for row in rows:
        print("  ".join(f"{k}={v}" for k, v in row.items()), file=out)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _call(module: str, function: str, what: str, extra: str, *args: Any, **kwargs: Any) -> int:
    """Calls a part of hal that needs an extra; without it, says which one."""
    from importlib import import_module

    try:
        fn = getattr(import_module(module), function)
        return int(fn(*args, **kwargs))
    except ModuleNotFoundError as e:
        if e.name and e.name.split(".")[0] == "hal":
            raise
        raise HalError(f"hal: {what} needs {e.name} — pip install 'hal-kernels[{extra}]'") from None


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


if __name__ == "__main__":
    main()
