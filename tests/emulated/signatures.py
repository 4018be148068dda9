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

FUNCTIONS = (
    "current_device", "device", "device_count", "get_device_name", "is_available", "memory_allocated", "synchronize",
)  # fmt: skip
"""Of ``torch.npu``."""
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
                made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
                for init in made:
                    del init.args.args[0]
            else:
                made = [node] if isinstance(node, ast.FunctionDef) else []
            if made and getattr(node, "name", "") in FUNCTIONS:
                for a in (*made[0].args.args, *made[0].args.kwonlyargs):
                    a.annotation = None
                found[node.name] = ast.unparse(made[0].args)
    return found


def operators(wheel: zipfile.ZipFile) -> dict[str, str]:
    """name -> its schema."""
    text = wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml").decode()
    lines = (re.match(r"\s*-? *func: (\w+)(\(.*)", line) for line in text.splitlines())
    return {m[1]: m[1] + m[2] for m in lines if m and m[1] in OPERATORS}


def read(path: str) -> dict[str, dict[str, str]]:
    with zipfile.ZipFile(path) as wheel:
        found = {"functions": functions(wheel), "operators": operators(wheel)}
    lacking = {*FUNCTIONS, *OPERATORS} - {*found["functions"], *found["operators"]}
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
