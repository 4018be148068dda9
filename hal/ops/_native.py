"""The key of a plain call, made in C: ``_sign.c``, compiled once where there is a compiler.

Everywhere else, and of any call that is not plain, Python makes the key (`hal.ops._key`), to the same effect.
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

import torch

from hal import _env
from hal.ops import _key
from hal.ops._arguments import Arg, TensorArg, of_indices

OPTIONAL, ALIGNED, REAL = 1, 2, 4


def signer(arguments: Mapping[str, Arg], static: frozenset[str]) -> Callable[..., bytes | None]:
    """What makes a signature of the tensors of a call, in their order, or None where it is not plain."""
    tensors = {n: a for n, a in arguments.items() if isinstance(a, TensorArg)}
    groups = _key.size_groups(arguments, static)
    module = _module() if tensors and groups is not None else None
    if module is None:
        return _unsigned
    at = {name: i for i, name in enumerate(tensors)}
    args = []
    for arg in tensors.values():
        real = not of_indices(arg) and _key.may_be(arguments, arg, "is_floating_point", "is_complex")
        flags = OPTIONAL * arg.optional + ALIGNED * (not of_indices(arg)) + REAL * real
        # Every place in which a static dim may stand, from the front: where ranks differ, a few too many.
        dims = sorted({i for a in arg.alternatives for i, d in enumerate(a) if d in static})
        args.append((flags, tuple(dims)))
    pairs = tuple((at[a], i, at[b], j) for (a, i), *rest in groups or () for b, j in rest)
    try:
        return module.Signer(tuple(args), pairs)  # type: ignore[no-any-return]
    except ValueError:  # more arguments than it has room for
        return _unsigned


def _unsigned(*_: Any) -> None:
    return None


@cache
def _module() -> Any:
    try:
        module = _built()
        module.setup(
            torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled,
            torch._C._get_tracing_state, torch.autograd.forward_ad,
        )  # fmt: skip
        return module
    except Exception:  # whatever it is that is missing, Python does the same
        return None


def _built() -> Any:
    """The module, from the cache or compiled into it."""
    source = Path(__file__).with_name("_sign.c")
    tag = hashlib.sha256(source.read_bytes() + sysconfig.get_config_var("SOABI").encode()).hexdigest()[:16]
    path = Path(_env.cache_dir()) / f"hal_sign-{tag}.so"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("it counts on the GIL")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "hal_sign.so"
            include = sysconfig.get_path("include")
            command = [*compiler, "-std=gnu11", "-O2", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            made.replace(path)
    spec = importlib.util.spec_from_file_location("hal_sign", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
