"""Compiling CPU kernels: explicit signatures, native entry points, a cache on disk of our own.

`Kernel` compiles a function once per signature and hands out numba's native wrapper. Calling that skips
the dispatcher's overload resolution, which costs more than most of these kernels run. Compiled code is kept under
``HAL_CACHE_DIR`` (default ``~/.cache/hal-kernels``), in a folder named by the sources and versions it
was made from: numba alone would not notice that an inlined helper in another file has changed.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
import torch

from hal import _env
from hal.backends.cpu import _amx, _files
from hal.backends.cpu._bits import POINTER, types_of
from hal.backends.cpu._team import spread

_lock = threading.Lock()


def cache_dir() -> Path:
    """Where the compiled code of these very sources lies."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    # Resolved, so that what is looked at is what is used, whatever becomes of a link on the way.
    return Path(_env.cache_dir()).resolve() / "cpu" / digest.hexdigest()[:16]


_folders: dict[Path, bool] = {}


def _folder() -> Path | None:
    """`cache_dir`, where compiled code may be read from it and kept in it."""
    folder = cache_dir()
    if folder not in _folders:
        _folders[folder] = _files.usable(folder)
    return folder if _folders[folder] else None


def _compile_cached(fn: Callable[..., Any], gil: bool = False) -> Any:
    options: dict[str, Any] = {"nogil": not gil, "fastmath": {"contract"}, "error_model": "numpy"}
    folder = _folder()
    if folder is None:
        return numba.njit(**options)(fn)
    # numba reads its cache folder from a global when a function is decorated; an engine's own choice for
    # its own functions must survive that.
    saved = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES = str(folder), "UserProvidedCacheLocator"
    try:
        dispatcher = numba.njit(cache=True, **options)(fn)
    except (RuntimeError, OSError) as e:
        _files.warn(f"compiled code can't be kept in {folder} ({e}); every process compiles anew")
        return numba.njit(**options)(fn)
    finally:
        numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES = saved
    # Of numba's cache of a function, what finds its key, takes code apart and puts it together again: no more.
    cache = dispatcher._cache
    stamp = cache._impl.locator.get_source_stamp()
    cache._cache_file = _files.Files(folder, f"{fn.__module__}.{fn.__qualname__}", stamp)
    cache._impl.locator.ensure_cache_path = lambda: None
    return dispatcher


def _alone() -> AbstractContextManager[None]:
    """No other process compiles meanwhile."""
    folder = _folder()
    return nullcontext() if folder is None else _files.alone(folder)


inline = numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")
"""For functions that kernels call. Contraction is all that fastmath may do here: it keeps NaN and Inf."""

words_ = ""  # in the globals of each copy of `_from_block`, where numba takes it for a literal


def _from_block(block):  # type: ignore[no-untyped-def]
    return spread(block, words_)


class _Block:
    """Compiled copies of `_from_block`: by the types of the arguments, where each lies."""

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}
        self.kept: list[Any] = []

    def __call__(self, words: str) -> int:
        return self.addresses.get(words) or self._compile(words)

    def _compile(self, words: str) -> int:
        with _lock, _alone():
            if words not in self.addresses:
                fn = FunctionType(_from_block.__code__, {**globals(), "words_": words})
                # numba names the file in its cache after it.
                fn.__qualname__ = "block_" + hashlib.sha256(words.encode()).hexdigest()[:16]
                dispatcher = _compile_cached(fn)
                dispatcher.compile((POINTER["i64"],))
                self.addresses[words] = _address_of(dispatcher.overloads[(POINTER["i64"],)])
                self.kept.append(dispatcher)
        return self.addresses[words]


def _address_of(compiled: Any) -> int:
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


from_block = _Block()


class Kernel:
    """A compiled function whose every argument's type is given by name.

    Args:
        fn: plain Python that numba compiles. It runs without the GIL and must not raise.
        types: a word an argument: a format of `_bits` for a pointer (passed as an int), ``int``, ``float``,
            ``bool`` or what else `types_of` knows; ``*name`` words are filled in per variant.
        shared: `block` will be asked for as well.
        gil: it asks Python, so it keeps the GIL.

    Example:
        >>> kernel = Kernel(fn, "int *out i64")
        >>> kernel("bf16")(n, out.data_ptr(), index.data_ptr())
    """

    def __init__(self, fn: Callable[..., Any], types: str, shared: bool = False, gil: bool = False) -> None:
        self.fn, self.types, self.shared, self.gil = fn, types.split(), shared, gil
        self.words = {name: 1 + i for i, name in enumerate(fn.__code__.co_varnames[: len(self.types)])}
        """By arguments' names, which word of `block` each is."""
        values = ("int", "float", "double", "bool", "object")
        # The first is a counter where there is one.
        self.pointers = array("q", [*(1 + i for i, t in enumerate(self.types) if i and t not in values), -1])
        self._block = struct.Struct("q" + "".join({"float": "f4x"}.get(t, "q") for t in self.types))
        self._entries: dict[tuple[str, ...], Any] = {}
        self._natives: dict[tuple[str, ...], tuple[int, int]] = {}
        self._dispatcher: Any = None

    def __call__(self, *variant: str) -> Any:
        """The native entry point for a variant: one format for each ``*name``, in order."""
        return self._entries.get(variant) or self._compile(variant)

    def block(self, variant: tuple[str, ...], args: tuple[Any, ...]) -> tuple[int, array[int]]:
        """For `_bits.invoke`: what to call, and the memory that holds the variant's own address and `args`."""
        caller, native = self._natives.get(variant) or self._native(variant)
        block = array("q", bytes(self._block.size))
        self._block.pack_into(block, 0, native, *args)
        return caller, block

    def warm(self, *variant: str) -> None:
        """Compiles all that calls of a variant will need, or loads it."""
        self(*variant)
        if self.shared:
            self._native(variant)

    def _words(self, variant: tuple[str, ...]) -> list[str]:
        names = [t for t in self.types if t.startswith("*")]
        given = dict(zip(dict.fromkeys(names), variant, strict=True))
        return [given.get(t, t) for t in self.types]

    def _signature(self, variant: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(types_of(self._words(variant)))

    def _compile(self, variant: tuple[str, ...]) -> Any:
        signature = self._signature(variant)
        with _lock, _alone():
            if variant not in self._entries:
                if self._dispatcher is None:
                    self._dispatcher = _compile_cached(self.fn, self.gil)
                self._dispatcher.compile(signature)
                self._entries[variant] = self._dispatcher.overloads[signature].entry_point
        return self._entries[variant]

    def _native(self, variant: tuple[str, ...]) -> tuple[int, int]:
        self(*variant)
        found = (
            from_block(" ".join(self._words(variant))),
            _address_of(self._dispatcher.overloads[self._signature(variant)]),
        )
        self._natives[variant] = found
        return found


def with_tiles(fn: Callable[..., Any], types: str) -> tuple[Kernel, Kernel, Callable[[torch.dtype, int, int], Kernel]]:
    """(the kernel by vectors, the one by tiles, which of them is for a dtype, head_dim and v_head_dim).

    ``TILES``, False in the globals of `fn`, is True in those of its copy: numba takes it for a constant.
    """
    by_tiles = FunctionType(fn.__code__, {**fn.__globals__, "TILES": True})
    by_tiles.__qualname__ = f"{fn.__qualname__}_by_tiles"  # numba names the file in its cache after it
    kernel, tile_kernel = Kernel(fn, types, shared=True), Kernel(by_tiles, types, shared=True)

    @cache
    def kernel_for(dtype: torch.dtype, dim: int, v_dim: int) -> Kernel:
        tiled = dtype == torch.bfloat16 and not (dim % 32 or v_dim % 32) and _amx.usable()
        return tile_kernel if tiled else kernel

    return kernel, tile_kernel, kernel_for
