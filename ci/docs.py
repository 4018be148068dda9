"""Writes docs/ops, docs/api.md, tables and the stubs from their sources; ``python ci/docs.py --check`` only compares.

Sources: the contracts (`OpSpec`), the manifests of hal's own backends, the conformance reports under docs/conformance
and bench/results, the timings under bench/results. Nothing depends on the machine that runs it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import docs_api
import docs_stubs
from docs_text import ROOT, item_list, markdown, sections, table

from hal._errors import ArgumentError
from hal._torch_ops import forms
from hal.conformance._result import NOT_APPLICABLE, OUTCOMES
from hal.ops import BUILTIN, get_spec
from hal.ops.spec import SHORT, OpSpec, PoolArg, ScaleArg, TensorArg, ValueArg
from hal.registry import Backend
from hal.registry._discover import BUILTIN as BACKENDS

BEGIN, END = "<!-- ops: written by ci/docs -->\n", "<!-- /ops -->"
STRIDES = {"contiguous": "contiguous", "inner": "last dim contiguous", "any": "any"}
_DERIVED = ("op", "bytes", "gbs", "tflops", "target", "ratio")
"""Fields of a timing that say nothing of its case."""


# --- sources ----------------------------------------------------------------------------------------


@cache
def manifests() -> dict[str, Backend]:
    return {name: import_module(module).hal_backend() for name, module in BACKENDS.items()}


@cache
def reports() -> list[tuple[str, dict[str, Any]]]:
    """(path, conformance report) of every one that is committed."""
    found = [*sorted(ROOT.glob("docs/conformance/**/report.json")), *sorted(ROOT.glob("bench/results/*.json"))]
    read = [(p.relative_to(ROOT).as_posix(), json.loads(p.read_text(encoding="utf-8"))) for p in found]
    return [(p, d) for p, d in read if isinstance(d, dict) and "verdict" in d and "cases" in d]


@cache
def timings() -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(path, machine, rows) of every bench run that is committed."""
    found = []
    for path in sorted([*ROOT.glob("bench/results/*.json"), *ROOT.glob("bench/results/*.jsonl")]):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            run: dict[str, Any] = {"rows": [json.loads(line) for line in text.splitlines() if line.strip()]}
        else:
            run = json.loads(text)
        if not isinstance(run, dict) or run.get("quick") or not isinstance(run.get("rows"), list):
            continue
        about = run.get("machine", run)
        versions = about.get("versions", {n: about.get(n) for n in ("torch", "triton")})
        machine = [
            about.get("device") if about.get("device") != "cpu" else about.get("cpu"),
            *(f"{n} {v}" for n, v in versions.items() if v),
            str(about.get("date", ""))[:10],
        ]
        found.append((path.relative_to(ROOT).as_posix(), ", ".join(filter(None, machine)), run["rows"]))
    return found


# --- an op's page -----------------------------------------------------------------------------------


def page(op: str) -> str:
    s = get_spec(op)
    doc = sections(s.doc)
    parts = [
        f"# {op}\n\n<!-- Written by ci/docs from the contract, the manifests and the results: edit those. -->",
        f"```python\nhal.{signature(s)}\n```",
        markdown(doc[""]),
        "## Arguments\n\n" + arguments(s),
        item_list(doc["Args"]),
        *(f"**{name}.** {markdown(doc[name])}" for name in ("Returns", "Source") if doc.get(name)),
        f"```python\n{doc['Example'].strip()}\n```",
        "## Errors\n\nEach raises `hal.ArgumentError` with nothing written; conformance tries every one.\n\n"
        + errors(s),
        "## Who has it\n\n" + implementations(s),
        proofs(s),
        speed(s),
        "## torch.library\n\n`hal.torch_ops()` registers it as\n\n```\n"
        + "\n".join(f"hal::{f.schema}" for f in forms(s))
        + "\n```",
    ]
    return "\n\n".join(p.strip() for p in parts if p.strip()) + "\n"


def signature(s: OpSpec) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in s.signature.parameters.values()]
    extra = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None)
    return f"{s.name}{inspect.Signature([*bare, extra])}"


def arguments(s: OpSpec) -> str:
    rows = []
    for name, arg in s.args.items():
        if isinstance(arg, TensorArg):
            shape = " or ".join(f"`[{', '.join(a)}]`" for a in arg.alternatives) + (", or None" if arg.optional else "")
            dtype = f"`{arg.dtypes}`'s" if isinstance(arg.dtypes, str) else ", ".join(SHORT[d] for d in arg.dtypes)
            rows.append([f"`{name}`", shape, dtype, STRIDES[arg.stride], "yes" if arg.mutated else ""])
        elif isinstance(arg, PoolArg):
            rows.append([f"`{name}`", "`hal.KVPool`", "any", "", "yes" if arg.mutated else ""])
        elif isinstance(arg, ScaleArg):
            rows.append([f"`{name}`", "a number, `[1]`, or None", "fp32", "", ""])
        else:
            assert isinstance(arg, ValueArg)
            values = ", ".join(f"`{c!r}`" for c in arg.choices) or s.signature.parameters[name].annotation
            rows.append([f"`{name}`", str(values), "", "", ""])
    return table(["argument", "shape or value", "dtype", "strides", "written"], rows)


def errors(s: OpSpec) -> str:
    rows = []
    for sample in s.errors:
        try:
            s.check_call(s.bind(**sample.make()))
        except ArgumentError as e:
            rows.append([sample.name, f"`{str(e).removeprefix(f'hal: {s.name}: ')}`"])
        else:
            raise AssertionError(f"{s.name}: {sample.name} is no error")
    return table(["tried", "what it says"], rows)


def implementations(s: OpSpec) -> str:
    rows = [["`reference`", "any", f"[hal/ops/{s.name}.py](../../hal/ops/{s.name}.py), plain torch", "", "yes", ""]]
    lacking = []
    for backend, manifest in manifests().items():
        for impl in manifest.impls(s.name):
            title = f"`{backend}/{impl.name}`" if impl.name else f"`{backend}`"
            lanes = impl.lanes or tuple(manifest.lanes)
            where = ", ".join(f"{'/'.join(manifest.lanes[lane])} ({lane})" for lane in lanes)
            module = str(impl.fn).partition(":")[0].removeprefix("hal.").replace(".", "/") + ".py"
            source = f"[{module}](../../{module})"
            note = "; ".join(filter(None, [impl.named and "where it is named", impl.note, *impl.requires]))
            rows.append([title, where, source, yes(impl.graph_safe), yes(impl.deterministic), note])
        if not manifest.impls(s.name):
            lacking.append(f"`{backend}`")
    head = ["implementation", "tensors on (lane)", "source", "graph safe", "deterministic", "note"]
    return table(head, rows) + (f"\n\nNot in {', '.join(lacking)}." if lacking else "")


def yes(flag: bool) -> str:
    return "yes" if flag else ""


def proofs(s: OpSpec) -> str:
    """What the conformance reports say of the op: verdicts, features, headroom."""
    required = [x for x in s.samples if x.tag == "required"]
    parts = [
        f"## Proof\n\nThe contract has {len(required)} required samples, "
        + (f"{len(s.samples) - len(required)} of features, " if s.features else "")
        + f"and {len(s.errors)} that must be refused; conformance puts each through every proof that applies."
    ]
    mine = [(path, r) for path, r in reports() if s.name in r["suite"]["ops"]]
    if not mine:
        return parts[0] + "\n\nNo conformance report of it is committed yet."
    rows, room = [], []
    for path, r in mine:
        cases = [c for c in r["cases"] if c["op"] == s.name]
        counts = {o: sum(c["outcome"] == o for c in cases) for o in OUTCOMES if o != NOT_APPLICABLE}
        shown = ", ".join(f"{n} {o.replace('_', ' ')}" for o, n in counts.items() if n)
        certified = "certified" if r["verdict"]["certified"] else "not certified"
        title = f"`{r['backend']}`, {r['lane']}"
        source = f"[report](../../{path}), suite {r['suite']['hash'][:8]}"
        rows.append([title, r["device"], r["date"], shown, certified, source])
        most: dict[str, float] = {}
        for c in cases:
            for dtype, value in c["headroom"].items():
                most[dtype] = max(most.get(dtype, 0.0), value)
        room.append((title, most))
    parts.append(table(["backend, lane", "device", "date", "cases", "backend", "from"], rows))
    if s.features:
        columns = [r["verdict"]["features"].get(s.name, {}) for _, r in mine]
        body = [[f"`{f}`", *(c.get(f, "") for c in columns)] for f in s.features]
        parts.append("Features, which a backend may refuse:\n\n" + table(["feature", *(r[0] for r in rows)], body))
    if any(m for _, m in room):
        dtypes = sorted({d for _, m in room for d in m})
        body = [[t, *(f"{m[d]:.4f}" if d in m else "" for d in dtypes)] for t, m in room if m]
        parts.append(
            "Headroom, the largest error in units of the bound (correct rounding alone comes close to 1):\n\n"
            + table(["backend, lane", *dtypes], body)
        )
    return "\n\n".join(parts)


def speed(s: OpSpec) -> str:
    """Every committed timing of the op, as it was measured."""
    parts = []
    for path, machine, rows in timings():
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            if row.get("op") != s.name:
                continue
            fields = [k for k, v in row.items() if v is not None and not isinstance(v, dict) and k not in _DERIVED]
            for measure, values in row.items():
                if isinstance(values, dict) and (measure.endswith("_us") or measure in ("gbs", "wall_gbs")):
                    groups.setdefault((measure, *fields), []).append(row)
        # What is given in microseconds needs no second table of bandwidth.
        timed = {key[1:] for key in groups if key[0].endswith("_us")}
        for (measure, *fields), several in groups.items():
            if not measure.endswith("_us") and tuple(fields) in timed:
                continue
            impls = list(dict.fromkeys(i for row in several for i in row[measure]))
            unit = f"{measure.removesuffix('_us')} µs" if measure.endswith("_us") else "GB/s"
            body = [
                [
                    *(str(row[f]) for f in fields),
                    *(f"{row[measure][i]:.3g}" if i in row[measure] else "" for i in impls),
                ]
                for row in several
            ]
            parts.append(
                f"{unit} ([{path}](../../{path}){': ' + machine if machine else ''}):\n\n"
                + table([*fields, *impls], body)
            )
    return "## Speed\n\n" + ("\n\n".join(parts) if parts else "No timing of it is committed yet.")


# --- the tables of all ops --------------------------------------------------------------------------


def matrix(to: str) -> str:
    """Ops x backends; `to`: the folder of the pages, from where the table stands."""
    rows = [[f"[`{op}`]({to}{op}.md)", "yes", *(cell(m, op) for m in manifests().values())] for op in BUILTIN]
    named = sorted({(i.name, i.note) for m in manifests().values() for op in BUILTIN for i in m.impls(op) if i.named})
    notes = "; ".join(f"`{name}`: {note.removeprefix('adapter: ')}" for name, note in named)
    foot = "\n\n\\* an adapter, taken where it is named, as in `HAL_BACKEND=cuda,decode_attention=cuda/flashinfer`; "
    return table(["op", "reference", *manifests()], rows) + (foot + notes if named else "")


def cell(manifest: Backend, op: str) -> str:
    """``yes``, and the names of those that have one."""
    found = [f"`{i.name}`" + ("\\*" if i.named else "") if i.name else "yes" for i in manifest.impls(op)]
    return ", ".join(found) or "–"


def index() -> str:
    parts = [
        "# The ops\n\n<!-- Written by ci/docs: edit the contracts, the manifests and the results. -->",
        "A page each: contract, arguments, errors, who has it, how it was proven, how fast it is.",
        matrix(""),
        "\n".join(f"- [`{op}`]({op}.md): {markdown(first_sentence(get_spec(op)))}" for op in BUILTIN),
        "## Backends",
    ]
    for name, manifest in manifests().items():
        requires: Any = manifest.requires
        needs = requires if isinstance(requires, Mapping) else dict.fromkeys(manifest.lanes, requires)
        lanes = []
        for lane, devices in manifest.lanes.items():
            packages = ", ".join(f"`{n}`" for n in needs.get(lane, ())) or "nothing"
            lanes.append(f"- lane `{lane}`: tensors on {', '.join(devices)}; needs {packages}")
        limits = [f"- may refuse `{limit}`: {text}" for limit, text in manifest.limits.items()]
        parts.append(f"`{name}`:\n\n" + "\n".join([*lanes, *limits]))
    return "\n\n".join(parts) + "\n"


def first_sentence(s: OpSpec) -> str:
    paragraph = " ".join(s.doc.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md: expected {BEGIN.strip()} ... {END}")
    return f"{head}{BEGIN}{matrix('docs/ops/')}\n{END}{tail}"


def files() -> dict[str, str]:
    """Path -> text of everything that is generated."""
    pages = {f"docs/ops/{op}.md": page(op) for op in BUILTIN}
    return {**pages, "docs/ops/README.md": index(), "README.md": readme(), **docs_stubs.files(), **docs_api.files()}


def find_drift() -> list[str]:
    """The generated files that are not what they should be, and pages of no op."""
    expected = files()
    differ = [p for p, text in expected.items() if not (ROOT / p).exists() or (ROOT / p).read_text("utf-8") != text]
    extra = [p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/ops/*.md")]
    return differ + sorted(set(extra) - set(expected))


def main(arguments: Sequence[str]) -> int:
    if "--check" in arguments:
        for path in find_drift():
            print(f"{path}: not what ci/docs writes", file=sys.stderr)
        return int(bool(find_drift()))
    for path, text in files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    for path in find_drift():
        (ROOT / path).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
