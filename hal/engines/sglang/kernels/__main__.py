"""``python -m hal.engines.sglang.kernels``: runs a program in which hal's functions have SGLang's names.

::

    python -m hal.engines.sglang.kernels --as sgl_kernel,sgl_kernel.kvcacheio -- pytest TESTS
    python -m hal.engines.sglang.kernels --over sglang.jit_kernel.rope -- pytest TESTS

SGLang's own tests, say, unchanged: they are not part of hal. Nothing else is put in anything's place.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from types import ModuleType

from hal._errors import HalError
from hal.engines import EngineError
from hal.engines.sglang import kernels


def take(name: str, folder: str | None = None) -> None:
    """Makes a module of this name that has hal's functions, whatever is installed.

    Args:
        name: such as ``sgl_kernel.kvcacheio``; packages above it that can't be imported are made too, empty.
        folder: where else its submodules are looked for, such as ``sgl_kernel.testing``.

    Raises:
        EngineError: a module of this name has been imported.
    """
    if name in sys.modules:
        raise EngineError(f"hal: {name} has been imported: whoever did keeps its functions; take the name before")
    module = _make(name, folder)
    module.__dict__.update({n: getattr(kernels, n) for n in kernels.__all__})


def _make(name: str, folder: str | None = None) -> ModuleType:
    above, _, own = name.rpartition(".")
    module = ModuleType(name, kernels.__doc__)
    module.__path__ = [] if folder is None else [folder]
    if above:
        try:
            package = importlib.import_module(above)
        except ModuleNotFoundError:
            package = _make(above)
        setattr(package, own, module)
    sys.modules[name] = module
    return module


def replace(name: str) -> list[str]:
    """Puts hal's functions over those that a module defines by the same names. Returns the names.

    Raises:
        EngineError: it defines none of them, or can't be imported.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        raise EngineError(f"hal: {name}: expected a module to put functions over; {e}") from e
    names = [n for n in kernels.__all__ if _defines(module, n)]
    if not names:
        raise EngineError(f"hal: {name}: defines no function that hal has by its name")
    for n in names:
        setattr(module, n, getattr(kernels, n))
    return names


def _defines(module: ModuleType, name: str) -> bool:
    # A Triton kernel says where it is from by the function that it wraps.
    found = getattr(module, name, None)
    return getattr(getattr(found, "fn", found), "__module__", None) == module.__name__


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hal.engines.sglang.kernels", description=__doc__)
    parser.add_argument("--as", dest="taken", default="", help="modules to make of hal's functions, by commas")
    parser.add_argument("--path", help="a folder with submodules of the first of them, such as testing/")
    parser.add_argument("--over", default="", help="modules whose functions hal's replace, by commas")
    parser.add_argument("module", help="what is run, as by python -m; after --")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    try:
        for i, name in enumerate(n for n in given.taken.split(",") if n):
            take(name, None if i else given.path)
        for name in (n for n in given.over.split(",") if n):
            print(f"hal: {name}: {', '.join(replace(name))}", file=sys.stderr)
    except HalError as e:
        print(e, file=sys.stderr)
        return 2
    sys.argv = [given.module, *given.args]
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
