"""The library's functions with their types, and the kernels that its streams hold."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable

from torch_npu._build import library

_Kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
_TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "s": ctypes.c_char_p, "k": _Kernel, "v": None}

lib = library()
# What each function of the library returns and takes, by the letters above.
for _function in """
    device:i set_device:vi stream:li set_stream:vil new_stream:li streams:li put:lil done:lil wait:vilill drain:vill
    query:iill launch:vill used:li capture:vil captured:pil capturing:ii replay:vip reset:vp fault:isi batches:vi
    count:li open:vk forked:v
""".split():
    _name, _letters = _function.split(":")
    _result, *_arguments = (_TYPES[letter] for letter in _letters)
    getattr(lib, f"npu_{_name}").restype, getattr(lib, f"npu_{_name}").argtypes = _result, _arguments

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
