"""Every call of hal's that goes to torch_npu has a name and arguments that the published wheels have."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hal

ROOT = Path(hal.__file__).parents[1]
STORED = json.loads(Path(__file__).with_name("signatures.json").read_text("utf-8"))
PLUGIN = ROOT / "examples/hal-backend-torch-npu"
SOURCES = [
    p for d in ("hal", "registry", "backends", PLUGIN / "hal_backend_torch_npu") for p in (ROOT / d).rglob("*.py")
]
MODULE = ("torch.npu", "torch_npu.npu", "npu")
"""What hal calls the module ``torch.npu``, beside `torch.get_device_module`."""


ASKED_FOR = ("_sleep",)
"""Of torch.cuda's module: called where a module has it, and torch_npu's has not."""
MADE = ("torch.get_device_module(", "_module(device", "_module(hands.")
"""What gives the module of a device's type."""


def any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def targets(tree: ast.AST, pattern: str) -> set[str]:
    """What is assigned an expression that has the pattern: names, attributes, each part of a tuple."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and re.search(pattern, ast.unparse(node.value)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {ast.unparse(t) for t in (target.elts if isinstance(target, ast.Tuple) else [target])}
    return found


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(where, name, call) of each call into torch_npu: of the module, its operators, its streams, events and graphs."""
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        modules = {*MODULE, "torch_npu"} | targets(tree, f"^({any_of(MADE)})")
        objects = targets(tree, rf"\b({any_of(modules)})[.,]")
        objects |= targets(tree, rf"^({any_of(objects)})\(\)$") if objects else set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            whose, name = ast.unparse(node.func.value), node.func.attr
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if whose in modules or whose.startswith((*MADE, "torch.ops.npu")) or name in STORED["operators"]:
                if name not in ASKED_FOR:
                    yield where, name, node
            elif name in STORED["methods"] and (whose in objects or whose.partition(".")[0] in modules):
                yield where, f".{name}", node


def signature(name: str) -> inspect.Signature:
    """Of a function or operator, or with a dot before it of a method."""
    kinds = inspect.Parameter
    if name in STORED["operators"]:
        arguments = torch._C.parse_schema(STORED["operators"][name]).arguments
        return inspect.Signature(
            kinds(
                "self_" if a.name == "self" else a.name,
                kinds.KEYWORD_ONLY if a.kwarg_only else kinds.POSITIONAL_OR_KEYWORD,
                default=a.default_value if a.has_default_value() else kinds.empty,
            )
            for a in arguments
        )
    space: dict[str, Any] = {}
    known = STORED["methods"] if name[0] == "." else STORED["functions"]
    exec(f"def f({known[name.strip('.')]}): ...", space)
    return inspect.signature(space["f"])


CALLS = list(calls())


def test_they_are_found() -> None:
    names = {name for _, name, _ in CALLS}
    known = {*STORED["functions"], *STORED["operators"], *(f".{name}" for name in STORED["methods"])}
    assert names == known - {"NPUGraph"}, "signatures.py writes them anew"
    assert all(len(digest) == 64 for digest in STORED["wheels"].values())
    assert {name.split("-")[1].split(".post")[0] for name in STORED["wheels"]} == {"2.6.0", "2.13.0"}


@pytest.mark.parametrize(("where", "name", "call"), CALLS, ids=[f"{name}-{where}" for where, name, _ in CALLS])
def test_a_call_binds(where: str, name: str, call: ast.Call) -> None:
    star = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    found = signature(name)
    given = ([a for a in call.args if not isinstance(a, ast.Starred)], {k.arg: k for k in call.keywords if k.arg})
    (found.bind_partial if star else found.bind)(*given[0], **given[1])


def test_a_wrong_call_does_not() -> None:
    with pytest.raises(TypeError):
        signature("synchronize").bind(1, 2)
    with pytest.raises(TypeError):
        signature("_foreach_copy_").bind([], [], blocking=True)


def test_the_emulated_names_have_those_parameters() -> None:
    for name in {*STORED["functions"]} - LACKING:
        mine, theirs = inspect.signature(getattr(torch.npu, name)), signature(name)
        named = [
            [(p.name, p.default) for p in s.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            for s in (mine, theirs)
        ]
        assert named[0] == named[1], name
    assert not any(hasattr(torch.npu, name) for name in LACKING)


LACKING = {"get_sync_debug_mode", "set_sync_debug_mode", "max_memory_allocated"}
"""What hal asks for by `hasattr` first, and does without."""


def test_the_plugins_stand_in_takes_what_the_operator_takes() -> None:
    """Its own tests call it with every option that the plugin has."""
    name = "npu_fused_infer_attention_score"
    tree = ast.parse((PLUGIN / "tests/stand_in.py").read_text("utf-8"))
    mine = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name).args
    theirs = signature(name).parameters
    assert [a.arg for a in mine.args] == list(theirs)[: len(mine.args)]
    assert {a.arg for a in mine.kwonlyargs} <= {*theirs}
    assert not mine.kwarg
