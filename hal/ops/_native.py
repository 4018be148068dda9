"""A plain call is read once, in C: ``_call.c``, compiled once where there is a compiler.

What is read tells calls apart for dispatch, and goes on to the backend's plan of it, where it has one
(`hal.triton.plans`). Everywhere else, and of any call that is not plain, Python makes the key (`hal.ops._key`), to the
same effect.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hal import _env
from hal.ops import _key
from hal.ops._arguments import Arg, PoolArg, ScaleArg, TensorArg, ValueArg, of_indices

OPTIONAL, ALIGNED, REAL = 1, 2, 4
TENSOR, SCALE, CHOICE, OFF, ANY = range(5)


def readable(arg: Arg) -> bool:
    """Whether the reader in C knows such arguments."""
    return not isinstance(arg, PoolArg) and not (
        isinstance(arg, ValueArg) and any(type(c) not in (bool, int, float) for c in arg.choices)
    )


def signer(arguments: Mapping[str, Arg], static: frozenset[str]) -> Callable[..., Any]:
    """What reads the `readable` arguments of a call, in their order: a key of it, or None where it is not plain."""
    read = {n: a for n, a in arguments.items() if readable(a)}
    groups = _key.size_groups(arguments, static)
    there = groups is not None and any(isinstance(a, TensorArg) for a in read.values())
    module = _module() if there else None
    if module is None:
        return _unsigned
    at = {name: i for i, name in enumerate(read)}
    pairs = tuple((at[a], i, at[b], j) for (a, i), *rest in groups or () for b, j in rest)
    try:
        return module.Signer(tuple(_told(arguments, a, static) for a in read.values()), pairs)  # type: ignore[no-any-return]
    except ValueError:  # more arguments than it has room for
        return _unsigned


def _told(arguments: Mapping[str, Arg], arg: Arg, static: frozenset[str]) -> tuple[int, int, tuple[int, ...], float]:
    """(kind, flags, dims, off) of an argument, as ``_call.c`` has them."""
    if isinstance(arg, TensorArg):
        real = not of_indices(arg) and _key.may_be(arguments, arg, "is_floating_point", "is_complex")
        flags = OPTIONAL * arg.optional + ALIGNED * (not of_indices(arg)) + REAL * real
        # Every place in which a static dim may stand, from the front: where ranks differ, a few too many.
        return TENSOR, flags, tuple(sorted({i for a in arg.alternatives for i, d in enumerate(a) if d in static})), 0.0
    if isinstance(arg, ScaleArg):
        return SCALE, REAL, (), 0.0
    assert isinstance(arg, ValueArg)
    kind = CHOICE if arg.choices else ANY if arg.off is None else OFF
    return kind, 0, (), float(arg.off or 0)


_takers: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()


def hand_over(fn: Callable[..., Any], taker: Callable[..., Any]) -> None:
    """Has dispatched calls of `fn` handed to ``taker(call, *args)``: what a `signer` read, or another key of it, and
    all arguments in the op's order. By the function itself: what wraps it is another."""
    _takers[fn] = taker


def taker_of(fn: Callable[..., Any]) -> Callable[..., Any] | None:
    """What `fn`'s calls are handed to, if anything."""
    try:
        return _takers.get(fn)
    except TypeError:  # it has no hash, or can't be referred to weakly
        return None


def _unsigned(*_: Any) -> None:
    return None


@cache
def _module() -> Any:
    try:
        return module()
    except Exception:  # whatever it is that is missing, Python does the same
        return None


@cache
def module() -> Any:
    """The module of ``_call.c``; raises what stands in its way."""
    made = _built()
    made.setup(
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor,
        torch.nn.Parameter,
        torch.is_grad_enabled,
        torch._C._get_tracing_state,
        torch.autograd.forward_ad,
    )
    return made


def _built() -> Any:
    """The module, from the cache or compiled into it."""
    source = Path(__file__).with_name("_call.c")
    parts = (source, *(source.parents[1] / "triton" / n for n in ("_launch.c", "_graphs.c", "_plans.c")))
    text = b"".join(p.read_bytes() for p in parts) + sysconfig.get_config_var("SOABI").encode()
    path = Path(_env.cache_dir()) / f"hal_call-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("it counts on the GIL")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "hal_call.so"
            include = sysconfig.get_path("include")
            command = [*compiler, "-std=gnu11", "-O2", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            made.replace(path)
    spec = importlib.util.spec_from_file_location("hal_call", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
