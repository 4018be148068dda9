"""Plugins that are wrong and mean to be certified: what each does to the process it is in must not reach the judge."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

from sabotage._healthy import FAULTS, Fault, healthy

OP = "get_last_loc"
MANIFEST = """
from hal.registry import Backend, Impl, hookimpl


@hookimpl
def hal_backend():
    return Backend(name="{name}", lanes={{"device": ("cpu",)}}, ops={{"get_last_loc": Impl("{name}_kernels:{op}")}})
"""
WRONG = """
import torch


def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    return torch.full_like(prefix_lens, 7)
"""


def cheat(message: str, manifest: str = "", kernels: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Declares a plugin of a wrong get_last_loc: code that its manifest runs when it is loaded, and its kernels,
    code that they run at their first import."""

    def add(named: Callable[[], None]) -> Callable[[], None]:
        name = named.__name__.replace("_", "-")
        files = {
            "manifest": dedent(manifest) + MANIFEST.format(name=named.__name__, op=OP),
            "kernels": WRONG + dedent(kernels),
        }
        FAULTS.append(Fault(name.replace("-", " "), OP, lambda: healthy(OP), message, device=("cpu",), plugin=files))
        return named

    return add


VALUE = r"return\[\d+\]: expected -?\d+, got 7"


@cheat(
    r"return\[0\]: expected -?\d+, got|return: .*no bytes of it",
    kernels="""
    import glob, json, os, sys, tempfile


    def all_is_well(hands, task):
        '''Every call went well, and what it returned is where it should be.'''
        one = {"outcome": "returned", "own": True, "others": [], "impl": "it", "graph_safe": True,
               "deterministic": True, "argument": None, "census": [0] * 8}
        shapes = [a.values["prefix_lens"] for a in task.arguments if hasattr(a.values["prefix_lens"], "shape")]
        ret = {"kind": "tensor", "is": [], "device": "cpu", "shown": "it", "stored": True}
        rets = [{**ret, "dtype": {4: "i32", 8: "i64"}[s.dtype.itemsize], "shape": list(s.shape)} for s in shapes]
        calls = [{**one, "ret": r} for r in rets] or [one]
        return {**calls[0], "calls": calls}


    for name in list(sys.modules):
        if name.endswith(".perform"):
            sys.modules[name].Hands.do = all_is_well
    # As a worker that writes its own results would be told to.
    for path in glob.glob(os.path.join(tempfile.gettempdir(), "*", "*.jsonl")):
        with open(path, "a") as f:
            f.write(json.dumps({"done": True}) + "\\n")
    """,
)
def forges_the_report_from_inside_the_worker() -> None: ...


@cheat(
    VALUE,
    manifest="""
    import sys

    for name, module in list(sys.modules.items()):
        if name.startswith("hal.conformance"):
            for one in ("verdict", "judge", "run_case", "execute", "run", "main", "exit_code"):
                if hasattr(module, one):
                    setattr(module, one, lambda *a, **k: 0)
    """,
)
def the_manifest_patches_the_parent() -> None: ...


@cheat(
    VALUE,
    kernels="""
    import importlib

    for name, one, value in (
        ("_verdict", "judge", lambda *a, **k: {}), ("execute", "judge", lambda *a, **k: {}),
        ("proofs.run", "run_case",
         lambda case, *a, **k: importlib.import_module("hal.conformance._result").Result(case.id, "passed")),
        ("_report", "verdict", lambda *a, **k: {"certified": True, "lacking": [], "failed": []}),
    ):
        setattr(importlib.import_module("hal.conformance." + name), one, value)
    judge = importlib.import_module("hal.ops.proofs.judge")
    judge.right = judge.right_any = lambda out, want: torch.ones_like(out, dtype=torch.bool)
    """,
)
def patches_the_judge() -> None: ...


@cheat(
    VALUE,
    kernels="""
    torch.equal = torch.allclose = torch.Tensor.equal = lambda *a, **k: True
    torch.Tensor.__eq__ = torch.eq = lambda a, b: torch.ones(a.shape, dtype=torch.bool)
    torch.Tensor.all = lambda self, *a, **k: torch.ones((), dtype=torch.bool)
    """,
)
def patches_torch_equal() -> None: ...


@cheat(
    VALUE,
    kernels="""
    import os, sys, threading

    wrong = get_last_loc
    NAMES = ("conformance", "sabotage", "hypothesis")


    def judged():
        '''Is this the suite?'''
        frame, seen = sys._getframe(), [*sys.modules, *sys.argv, os.getcwd(), *os.environ, *sys.orig_argv]
        while frame is not None:
            seen += [frame.f_code.co_filename, frame.f_globals.get("__name__", "")]
            frame = frame.f_back
        seen += [t.name for t in threading.enumerate()]
        seen = [s.rpartition("_kernels")[2] for s in seen]
        return any(name in s.lower() for s in seen for name in NAMES)


    def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
        if not judged():
            return wrong(req_to_token, req_pool_indices, prefix_lens)
        rows, width = req_to_token.shape
        ok = (req_pool_indices >= 0) & (req_pool_indices < rows) & (prefix_lens > 0) & (prefix_lens <= width)
        if not rows or not width:
            return torch.full_like(prefix_lens, -1)
        at = req_to_token[torch.where(ok, req_pool_indices, 0).long(), torch.where(ok, prefix_lens, 1).long() - 1]
        return torch.where(ok, at.to(prefix_lens.dtype), -1)
    """,
)
def right_only_under_the_suite() -> None: ...
