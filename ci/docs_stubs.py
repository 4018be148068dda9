"""The stubs of the ops, from their contracts: what `ci/docs.py` writes as hal/_api.pyi and hal/_bound.pyi.

Laid out as ruff's formatter would, which CI runs over them.
"""

from __future__ import annotations

import inspect
import textwrap

from hal.ops import BUILTIN, get_spec

WIDTH = 120
HEAD = "from torch import Tensor\n\nfrom hal.kv.pool import KVPool\n\n"
_API = '''"""The signatures of the dispatched ops, for type checkers and editors alone: `hal.<op>` is generated.

Written by ci/docs from the contracts.
"""

'''
_BOUND = '''"""The signatures of the ops as `hal.bind` gives them: those of `hal.<op>` without ``backend``.

Written by ci/docs from the contracts.
"""

'''


def files() -> dict[str, str]:
    """Path -> text."""
    dispatched = "".join(function(op, ["backend: str | None = None"]) for op in BUILTIN)
    same = "".join(f"    {op} = staticmethod({op})\n" for op in BUILTIN)
    names = "    def __iter__(self) -> Iterator[str]: ...\n"
    torch_ops = f'\nclass TorchOps:\n    """What `hal.torch_ops` returns."""\n\n{same}{names}'
    methods = "".join(function(op, [], method=True) for op in BUILTIN)
    bound = f"class Ops:\n{methods}"
    iterator = "from collections.abc import Iterator\n\n"
    return {"hal/_api.pyi": _API + iterator + HEAD + dispatched + torch_ops, "hal/_bound.pyi": _BOUND + HEAD + bound}


def function(op: str, more: list[str], method: bool = False) -> str:
    """``def op(...) -> ...: ...``, with keyword-only parameters of ours after its own."""
    s = get_spec(op).signature
    parts = ["self"] if method else []
    for p in s.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if p.default is inspect.Parameter.empty else f" = {literal(p.default)}"
        parts.append(f"{p.name}: {p.annotation}{default}")
    if more:
        parts += ["*", *more] if "*" not in parts else more
    text = _lay_out(f"def {op}(", parts, f") -> {s.return_annotation}: ...", WIDTH - 4 * method)
    return textwrap.indent(text, "    " * method)


def literal(value: object) -> str:
    text = repr(value)
    if isinstance(value, str):
        return f'"{value}"'
    return text.replace("e-0", "e-") if isinstance(value, float) else text


def _lay_out(begin: str, parts: list[str], end: str, width: int) -> str:
    joined = ", ".join(parts)
    if len(begin + joined + end) <= width:
        return f"{begin}{joined}{end}\n"
    if len(joined) + 4 <= width:
        return f"{begin}\n    {joined}\n{end}\n"
    return begin + "\n" + "".join(f"    {p},\n" for p in parts) + end + "\n"
