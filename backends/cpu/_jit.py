"""Compiling CPU kernels: explicit signatures, native entry points, a cache on disk of our own.

`Kernel` compiles a function once per signature and hands out numba's native wrapper. Calling that skips
the dispatcher's overload resolution, which costs more than most of these kernels run. Compiled code is kept under
``HAL_CACHE_DIR`` (default ``~/.cache/hal-kernels``), in a folder named by the sources and versions it
was made from: numba alone would not notice that an inlined helper in another file has changed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import llvmlite
import numba

from hal import _env
from hal.backends.cpu._bits import POINTER

_lock = threading.Lock()


def cache_dir() -> Path:
    """Where the compiled code of these very sources lies."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return Path(_env.cache_dir()) / "cpu" / digest.hexdigest()[:16]


def _cached(fn: Callable[..., Any]) -> Any:
    # numba reads its cache folder from a global when a function is decorated; an engine's own choice for
    # its own functions must survive that.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    saved = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES = str(cache_dir()), "UserProvidedCacheLocator"
    try:
        return numba.njit(cache=True, **options)(fn)
    except (RuntimeError, OSError):  # a read-only file system: compile in every process
        return numba.njit(**options)(fn)
    finally:
        numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES = saved


@contextmanager
def _alone() -> Iterator[None]:
    """No other process compiles meanwhile.

    numba reads its index, picks a free file name and writes both: two workers that start together could give one
    file two meanings. So the second waits, and finds compiled what it needs.
    """
    with ExitStack() as held:
        with suppress(OSError, NotImplementedError):  # a file system that is read-only, or without locks
            folder = cache_dir()
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(filelock.FileLock(folder / "lock"))
        yield


inline = numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")
"""For functions that kernels call. Contraction is all that fastmath may do here: it keeps NaN and Inf."""


class Kernel:
    """A compiled function whose every argument's type is given by name.

    Args:
        fn: plain Python that numba compiles. It runs without the GIL and must not raise.
        types: a word an argument: a format of `_bits` for a pointer (passed as an int), ``int``, ``float``
            or ``bool``; ``*name`` words are filled in per variant.

    Example:
        >>> kernel = Kernel(fn, "int *out i64")
        >>> kernel("bf16")(n, out.data_ptr(), index.data_ptr())
    """

    def __init__(self, fn: Callable[..., Any], types: str) -> None:
        self.fn, self.types = fn, types.split()
        self._entries: dict[tuple[str, ...], Any] = {}
        self._dispatcher: Any = None

    def __call__(self, *variant: str) -> Any:
        """The native entry point for a variant: one format for each ``*name``, in order."""
        return self._entries.get(variant) or self._compile(variant)

    def _compile(self, variant: tuple[str, ...]) -> Any:
        scalars = {"int": numba.int64, "float": numba.float32, "bool": numba.boolean}
        names = [t for t in self.types if t.startswith("*")]
        given = dict(zip(dict.fromkeys(names), variant, strict=True))
        words = [given.get(t, t) for t in self.types]
        signature = tuple(scalars[w] if w in scalars else POINTER[w] for w in words)
        with _lock, _alone():
            if variant not in self._entries:
                if self._dispatcher is None:
                    self._dispatcher = _cached(self.fn)
                self._dispatcher.compile(signature)
                self._entries[variant] = self._dispatcher.overloads[signature].entry_point
        return self._entries[variant]
