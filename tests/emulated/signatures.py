"""The signatures of torch_npu's names that hal calls, out of published wheels: ``python signatures.py WHEEL ...``.

Facts alone go into ``signatures.json``: names, parameters, and which wheels say so, all the same.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

FUNCTIONS = tuple(
    """
    Event NPUGraph Stream current_device current_stream device device_count get_device_name get_device_properties
    get_sync_debug_mode graph is_available is_current_stream_capturing max_memory_allocated memory_allocated
    set_sync_debug_mode stream synchronize
    """.split()
)
"""Of ``torch.npu``."""
METHODS = ("elapsed_time", "query", "record", "replay", "synchronize", "wait_event", "wait_stream")
"""Of its streams, events and graphs; two classes that have one of a name have it alike."""
OPERATORS = ("_foreach_copy_", "npu_fused_infer_attention_score")
STORED = Path(__file__).with_name("signatures.json")


def functions(wheel: zipfile.ZipFile) -> dict[str, str]:
    """name -> its parameters; of a class those of its ``__init__``, without self."""
    found = {}
    for file in sorted(wheel.namelist()):
        if not re.fullmatch(r"torch_npu/npu/\w+\.py", file):
            continue
        for node in ast.parse(wheel.read(file)).body:
            if isinstance(node, ast.ClassDef):
                # What torch has made in C is made by `__new__`.
                made = sorted(_methods(node, ("__init__", "__new__")), key=lambda f: (len(f.args.args), f.name))[-1:]
                for init in made:
                    del init.args.args[0]
            else:
                made = [node] if isinstance(node, ast.FunctionDef) else []
            if made and getattr(node, "name", "") in FUNCTIONS:
                found[node.name] = _parameters(made[0])
    return found


def _methods(node: ast.ClassDef, names: tuple[str, ...]) -> list[ast.FunctionDef]:
    return [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names]


def _parameters(made: ast.FunctionDef) -> str:
    for a in (*made.args.args, *made.args.kwonlyargs):
        a.annotation = None
    return ast.unparse(made.args)


def methods(wheel: zipfile.ZipFile) -> dict[str, str]:
    """name -> its parameters, without self."""
    found: dict[str, str] = {}
    for file in ("torch_npu/npu/streams.py", "torch_npu/npu/graphs.py"):
        classes = (n for n in ast.parse(wheel.read(file)).body if isinstance(n, ast.ClassDef))
        for node in classes:
            for method in _methods(node, METHODS) if node.name in ("Event", "NPUGraph", "Stream") else ():
                del method.args.args[0]
                if found.setdefault(method.name, _parameters(method)) != _parameters(method):
                    sys.exit(f"{node.name}.{method.name} is not as another class has it")
    return found


def operators(wheel: zipfile.ZipFile) -> dict[str, str]:
    """name -> its schema."""
    text = wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml").decode()
    lines = (re.match(r"\s*-? *func: (\w+)(\(.*)", line) for line in text.splitlines())
    return {m[1]: m[1] + m[2] for m in lines if m and m[1] in OPERATORS}


def read(path: str) -> dict[str, dict[str, str]]:
    with zipfile.ZipFile(path) as wheel:
        found = {"functions": functions(wheel), "methods": methods(wheel), "operators": operators(wheel)}
    lacking = {*FUNCTIONS, *METHODS, *OPERATORS} - {name for kind in found.values() for name in kind}
    if lacking:
        sys.exit(f"{path} has no {', '.join(sorted(lacking))}")
    return found


def main(paths: list[str]) -> None:
    found = [read(path) for path in paths]
    if any(other != found[0] for other in found):
        sys.exit(f"the wheels differ: {found}")
    wheels = {Path(p).name: hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in paths}
    STORED.write_text(json.dumps({"wheels": wheels, **found[0]}, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
