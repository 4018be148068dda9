"""The Python API page from docstrings, and the table of environment variables from hal/_env.py."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from docs_stubs import literal
from docs_text import ROOT, item_list, markdown, sections, table

import hal
from hal import _env
from hal.kv.pool import LAYOUTS
from hal.ops import BUILTIN, spec
from hal.registry._select import Explanation, Verdict

GROUPS = {
    "Choosing a backend": ("use", "configure", "reload"),
    "Binding once": ("bind", "torch_ops", "warmup"),
    "Asking why": ("explain", "info", "trace"),
    "Pools, slots, pages": ("KVPool", "SlotAllocator", "num_new_pages"),
    "A backend without a package": ("register", "unregister"),
    "Errors": ("HalError", "ArgumentError", "SelectionError", "NoBackendError", "BackendError", "FallbackWarning"),
}
"""Every public name but the ops, which have pages of their own."""
OWN_OPS = {
    "hal.ops.spec": (
        "OpSpec",
        "Proof",
        "Sample",
        "ErrorSample",
        "TensorArg",
        "PoolArg",
        "ScaleArg",
        "ValueArg",
        "Signature",
        "TensorSig",
        "PoolSig",
        "describe",
    ),
    "hal.ops.proofs.judge": ("Want", "Candidate"),
    "hal.ops.proofs.inputs": ("generator", "randint", "floats", "odd_indices", "row_view"),
    "hal.ops.proofs.fresh": ("Fresh", "Wide", "room_for", "table_fresh"),
}
"""What a plugin's author writes an op with."""
BELOW = {"explain": (Explanation, Verdict)}
"""Classes that a function returns and the page tells of right after it."""
BEGIN, END = "<!-- environment: written by ci/docs -->\n", "<!-- /environment -->"
DEFAULTS = {"HAL_BACKEND": "`auto`", "HAL_PLUGINS": "all", "HAL_ENGINES": "none", "HAL_TRACE": "off"}
DEFAULTS["HAL_CACHE_DIR"] = "`$XDG_CACHE_HOME/hal-kernels`, or `~/.cache/hal-kernels`"


def files() -> dict[str, str]:
    """Path -> text."""
    return {"docs/api.md": page(), "docs/environment.md": environment()}


def page() -> str:
    parts = [
        "# Python API\n\n<!-- Written by ci/docs from the docstrings: edit those. -->",
        "What `import hal` offers beside the ops, which have [pages of their own](ops/README.md). Type checkers know "
        "each op as `hal.bind` gives it, and a name that does not exist is an error to them. A plugin's own op is "
        '`getattr(ops, "its_name")` there.',
    ]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            parts += entry(f"hal.{name}", getattr(hal, name), 3)
            if name == "KVPool":
                rows = [[f"`{n}`", f"`{shape}`"] for n, shape in LAYOUTS.items()]
                parts.append(table(["layout", "shape: L layers, S slots, P pages"], rows))
            for below in BELOW.get(name, ()):
                parts += entry(f"hal.registry.{below.__name__}", below, 4)
    parts.append(
        "## An op of a plugin's own\n\nWhat such an op is declared and proven with; "
        "[an example](writing-a-backend.md#8-an-op-of-your-own)."
    )
    for module, names in OWN_OPS.items():
        parts.append(f"### `{module}`")
        for name in names:
            parts += entry(name, getattr(import_module(module), name), 4, methods=False)
    return "\n\n".join(p.strip() for p in parts if p.strip()) + "\n"


def entry(title: str, thing: Any, level: int, methods: bool = True) -> list[str]:
    """A heading, the signature, the docstring by its sections; of a class its public methods too."""
    doc = sections(thing.__doc__)
    parts = [f"{'#' * level} `{title}`"]
    error = inspect.isclass(thing) and issubclass(thing, Exception)
    if not error and is_dataclass(thing):
        if fields(thing):
            parts.append("```python\n" + "\n".join(f"{f.name}: {f.type}" for f in fields(thing)) + "\n```")
    elif not error and callable(thing):
        parts.append(f"```python\n{signature(title, thing)}\n```")
    parts.append(markdown(doc[""]))
    for name in ("Args", "Attributes", "Raises"):
        if doc.get(name):
            parts += [f"**{name}**", item_list(doc[name])]
    if doc.get("Returns"):
        parts.append(f"**Returns** {markdown(doc['Returns'])}")
    if doc.get("Example"):
        parts.append(f"```python\n{doc['Example'].strip()}\n```")
    if methods and inspect.isclass(thing) and not error:
        parts += [p for n, m in vars(thing).items() if not n.startswith("_") for p in member(title, n, m)]
    return parts


def member(title: str, name: str, found: Any) -> list[str]:
    """A public method or property with a docstring, as an item of its own."""
    shown = f"{title.rpartition('.')[2]}.{name}"
    if isinstance(found, property) and found.__doc__:
        return [f"`{shown}`: {markdown(inspect.cleandoc(found.__doc__))}"]
    method = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if not inspect.isfunction(method) or not method.__doc__:
        return []
    doc = sections(method.__doc__)
    parts = [f"```python\n{signature(shown, method)}\n```", markdown(doc[""])]
    for section in ("Args", "Raises"):
        if doc.get(section):
            parts += [f"**{section}**", item_list(doc[section])]
    return parts


def signature(title: str, thing: Any) -> str:
    found = inspect.signature(thing)
    parts: list[str] = []
    for name, p in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not any(x.startswith("*") for x in parts):
            parts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else " = " + literal(p.default)
        parts.append(f"{star}{name}: {p.annotation}{default}")
    result = "" if inspect.isclass(thing) else f" -> {found.return_annotation}"
    line = f"{title}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    return f"{title}(\n" + "".join(f"    {p},\n" for p in parts) + f"){result}"


def environment() -> str:
    path = ROOT / "docs/environment.md"
    head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"docs/environment.md: expected {BEGIN.strip()} ... {END}")
    rows = [[f"[`{n}`](#{n.lower()})", markdown(text), default(n)] for n, text in _env.VARIABLES.items()]
    return f"{head}{BEGIN}{table(['variable', 'meaning', 'default'], rows)}\n{END}{tail}"


def default(name: str) -> str:
    choices = _env.CHOICES.get(name)
    return f"`{choices[0]}`" if choices else DEFAULTS[name]


def missing() -> set[str]:
    """Public names that the page does not tell of."""
    shown = {n for names in GROUPS.values() for n in names}
    own = {n for n in spec.__all__ if callable(getattr(spec, n))} - {*OWN_OPS["hal.ops.spec"]}
    return ({*hal.__all__} - {*BUILTIN} - {"__version__"} - shown) | own
