"""The library's functions with their types, and the kernels that its streams hold."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable

from torch_npu._build import library

_Kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
_I, _L, _P = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

lib = library()
for _name, _result, _arguments in (
    ("device", _I, []), ("set_device", None, [_I]), ("stream", _L, [_I]), ("set_stream", None, [_I, _L]),
    ("new_stream", _L, [_I]), ("streams", _L, [_I]), ("put", _L, [_I, _L]), ("done", _L, [_I, _L]),
    ("wait", None, [_I, _L, _I, _L, _L]),
    ("drain", None, [_I, _L, _L]), ("query", _I, [_I, _L, _L]), ("launch", None, [_I, _L, _L]), ("used", _L, [_I]),
    ("capture", None, [_I, _L]), ("captured", _P, [_I, _L]), ("capturing", _I, [_I]), ("replay", None, [_I, _P]),
    ("reset", None, [_P]), ("fault", _I, [ctypes.c_char_p, _I]), ("batches", None, [_I]), ("count", _L, [_I]),
    ("open", None, [_Kernel]), ("forked", None, []),
):  # fmt: skip
    _function = getattr(lib, f"npu_{_name}")
    _function.restype, _function.argtypes = _result, _arguments

_numbers = itertools.count()
_kernels: dict[int, Callable[[], None]] = {}
_captured: dict[int, Callable[[], None]] = {}
"""Kernels that graphs hold, which start them again and again."""
_lock = threading.Lock()


@_Kernel
def _run(number: int, why: int, size: int) -> int:
    try:
        (_captured.get(number) or _kernels.pop(number))()
    except BaseException as e:
        text = f"npu: a kernel failed, and whoever waits for its stream is told: {type(e).__name__}: {e}"
        ctypes.memmove(why, text.encode()[: size - 1], min(len(text.encode()), size - 1))
        return 1
    return 0


def launch(device: int, work: Callable[[], None], stream: int | None = None) -> None:
    """Puts a kernel into a stream of `device`: the current one, unless it is named."""
    number = next(_numbers)
    (_captured if lib.npu_capturing(device) else _kernels)[number] = work
    lib.npu_launch(device, lib.npu_stream(device) if stream is None else stream, number)


def drain(device: int, stream: int, until: int) -> None:
    """Waits until a stream has done its first `until` tasks.

    Raises:
        RuntimeError: a kernel that ran since somebody last waited has failed.
    """
    lib.npu_drain(device, stream, until)
    check()


def check() -> None:
    """Raises RuntimeError where something that ran, or was asked for in a capture, has failed since the last call."""
    why = ctypes.create_string_buffer(2048)
    if lib.npu_fault(why, 2048):
        raise RuntimeError(why.value.decode(errors="replace"))


lib.npu_open(_run)
os.register_at_fork(after_in_child=lib.npu_forked)
