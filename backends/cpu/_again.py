"""A call of the same sizes and strides as one before is started by compiled code, which reads the tensors itself.

An engine calls an op once a layer, with other tensors of the same layout, and Python takes longer to ask eight tensors
for their sizes than a kernel takes for a few keys. So the first such call leaves what it gave its kernel (`Call.keep`),
and the next one is compared with it and started in one step (`Memo.start`): pointers are the tensors' own, read as they
are now by torch's DLPack exchange; all else, the number of threads too, is what decided the earlier call. Whatever is
new goes the way that every call can go: nothing needs what stands here.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from array import array
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from hal.backends.cpu._bits import I32, I64, address, load, move, shift, store, types, view
from hal.backends.cpu._jit import Kernel, inline
from hal.backends.cpu._team import in_team, invoke

TENSORS, NUMBERS, PLACES_MOST = 10, 5, 14
"""Of a call, at most; words of a kernel's arguments that are other in the next."""
DIMS, TELLING = 4, 36
"""Of a tensor, at most: its dims; its elements where they tell calls apart."""
KEY, BLOCK, TABLE, ENTRIES = 256, 64, 80, 8
"""Words of what tells calls apart, of what a kernel is given, of a table of it; calls that are remembered."""
LENGTH, CALLER, TEAM, THREADS, SIZE, PLACES, TABLED, ROOM, COUNTS = range(9)
"""Where in an entry: words of its key (0: none is there), and what starts it."""
KEYS, GIVEN, WHERE, LISTED = 9, 9 + KEY, 9 + KEY + BLOCK, 9 + KEY + BLOCK + 3 * PLACES_MOST
ENTRY = LISTED + TABLE
IN_TABLE, IN_ROOM, IN_COUNTS, LENGTH_OF, SOURCES = range(TENSORS, TENSORS + 5)
"""What a kernel's pointer goes into, beside the tensors; the length of the one that grows."""
GROWS = "nnz"
"""The kernels' name for a length that grows."""
NEW, DONE = 0, 1
CPU = 1
"""The device of tensors in memory, and its first, as DLPack has it in a word."""

_clear_error = types.ExternalFunction("PyErr_Clear", types.void())
_leave = types.ExternalFunction("PyEval_SaveThread", types.int64())
_enter = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))


@intrinsic  # type: ignore[untyped-decorator]
def _ask(typingctx: Any, read: Any, tensor: Any, to: Any) -> Any:
    """Whether the object at `tensor` is one, by DLPack's reader at `read`: `to` has what that says of it then."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [I64, I64])
        failed = b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return b.icmp_signed("==", failed, I32(0))

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _where(typingctx: Any, x: Any) -> Any:
    """Where an object lies; 0 for None."""
    return types.int64(x), lambda context, b, signature, args: args[0]


@intrinsic  # type: ignore[untyped-decorator]
def _bits(typingctx: Any, x: Any) -> Any:
    """A double's bits."""
    return types.int64(types.float64), lambda context, b, signature, args: b.bitcast(args[0], I64)


@inline
def about(n):  # type: ignore[no-untyped-def]
    """`n` rounded up to three bits and zeros, as a growing length seldom changes."""
    bits = 0
    while n >> bits > 7:
        bits += 1
    return (n + (1 << bits) - 1) >> bits << bits


@inline
def _describe(key, n, t, data, telling, grows):  # type: ignore[no-untyped-def]
    """Adds to a key what it must know of the tensor that DLPack has at `t`. Its length then; 0: no key can."""
    dims = load(t, 2) & 0xFFFFFFFF
    if load(t, 1) != CPU or dims > DIMS or load(t, 3) == 0 or load(t, 4) == 0:
        return 0
    sizes, steps = view(load(t, 3), "i64"), view(load(t, 4), "i64")
    if data == 0:
        size = 1
        for i in range(dims):
            size *= load(sizes, i)
        if size:  # a tensor of no memory, such as tracing has
            return 0
    store(key, n, load(t, 2))
    for i in range(dims):
        store(key, n + 1 + i, load(sizes, i))
        store(key, n + 1 + dims + i, load(steps, i))
    if grows:
        store(key, n + 1, about(load(sizes, 0)))
    n += 1 + 2 * dims
    if telling:
        count = load(sizes, 0) if dims else 1
        if dims > 1 or count > TELLING or (count > 1 and load(steps, 0) != 1):
            return 0
        for i in range(count):
            if load(t, 2) >> 40 & 0xFF == 64:
                store(key, n + i, load(view(data, "i64"), i))
            else:
                store(key, n + i, load(view(data, "i32"), i))
        n += count
    return n


@inline
def _tell(read, threads, telling, grows, objects, numbers, t, data, key):  # type: ignore[no-untyped-def]
    """What tells a call apart, at `key`, and where its tensors begin, at `data`. The key's length; 0: no key can."""
    store(key, 0, threads)
    for j in range(NUMBERS):
        store(key, 1 + j, _bits(numbers[j]))
    n = 1 + NUMBERS
    for j in range(TENSORS):
        if n + 2 + 2 * DIMS + TELLING > KEY:
            return 0
        place = _where(objects[j])
        if place == 0:
            store(data, j, -1 - j)
            store(key, n, -1)
            n += 1
            continue
        if not _ask(read, place, address(t)):
            _clear_error()
            return 0
        store(data, j, load(t, 0) + load(t, 5))
        same = 0  # of the tensors that begin where this one does, the first
        while load(data, same) != load(data, j):
            same += 1
        store(key, n, same)
        n = _describe(key, n + 1, t, load(data, j), (telling >> j) & 1, j == grows)
        if j == grows:
            store(data, LENGTH_OF, load(view(load(t, 3), "i64"), 0))
        if n == 0:
            return 0
    return n


def _again(  # type: ignore[no-untyped-def]
    memory, read, threads, telling, grows, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, x0, x1, x2, x3, x4
):  # fmt: skip
    """Starts the call, if `memory` holds one like it."""
    objects, numbers = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9), (x0, x1, x2, x3, x4)
    scratch = np.empty(6 + SOURCES + 1 + BLOCK + TABLE + KEY, np.int64)
    t = view(scratch.ctypes.data, "i64")
    data = shift(t, 6)
    block = shift(data, SOURCES)
    table = shift(block, 1 + BLOCK)
    key = shift(table, TABLE)
    result = NEW
    n = _tell(read, threads, telling, grows, objects, numbers, t, data, key)
    for e in range(ENTRIES if n else 0):
        entry = shift(memory, e * ENTRY)
        i = 0
        if load(entry, LENGTH) == n:
            while i < n and load(entry, KEYS + i) == load(key, i):
                i += 1
        if i < n:
            continue
        room, counts = np.empty(load(entry, ROOM), np.float32), np.zeros(load(entry, COUNTS), np.int64)
        store(data, IN_TABLE, address(table))
        store(data, IN_ROOM, room.ctypes.data)
        store(data, IN_COUNTS, counts.ctypes.data)
        move(table, shift(entry, LISTED), load(entry, TABLED))
        move(shift(block, 1), shift(entry, GIVEN), load(entry, SIZE))
        for i in range(load(entry, PLACES)):
            at = shift(entry, WHERE + 3 * i)
            store(block, 1 + load(at, 0), load(data, load(at, 1)) + load(at, 2))
        store(block, 0, 0)
        store(block, 2, address(block))  # the counter that threads share
        caller, team, many = load(entry, CALLER), load(entry, TEAM), load(entry, THREADS)
        left = _leave()
        if many > 1:
            failed = in_team(team, many, caller, shift(block, 1))
        else:
            failed = invoke(caller, shift(block, 1))
        _enter(left)
        result = DONE
        # Their last use: numba frees an array right after that, whoever still holds its address.
        if len(room):
            room[0] = 0
            counts[0] = 0
        if failed:
            raise MemoryError("a kernel had none for what it needs beside its arguments")
        break
    scratch[0] = 0
    return result


@inline
def _place(places, count, word, source, behind):  # type: ignore[no-untyped-def]
    """One more word of a kernel's arguments that is other in the next call. How many there are; too many: none more."""
    if count < PLACES_MOST:
        store(places, 3 * count, word)
        store(places, 3 * count + 1, source)
        store(places, 3 * count + 2, behind)
    return count + 1


def _keep(  # type: ignore[no-untyped-def]
    entry, read, threads, telling, grows, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, x0, x1, x2, x3, x4,
    head, block, table, room, counts, pointers, length, inside, within, behind,
):  # fmt: skip
    """Makes of `entry` the call that was started so.

    pointers: the words of `block` that are some, -1 after them. length: the word that has how long the tensor is that
    grows. inside: the word that lies `behind` bytes behind the begin of tensor `within`. Either 0: there is none.
    """
    objects, numbers = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9), (x0, x1, x2, x3, x4)
    scratch = np.empty(6 + SOURCES, np.int64)
    t = view(scratch.ctypes.data, "i64")
    data, places = shift(t, 6), shift(entry, WHERE)
    move(entry, head, KEYS)
    store(entry, LENGTH, 0)
    n = _tell(read, threads, telling, grows, objects, numbers, t, data, shift(entry, KEYS))
    store(data, IN_TABLE, address(table))
    store(data, IN_ROOM, room)
    store(data, IN_COUNTS, counts)
    count = 0
    for word, source, more in ((length, LENGTH_OF, 0), (inside, within, behind)):
        if word:
            count = _place(places, count, word, source, more)
    p = 0
    while n and load(pointers, p) >= 0:
        word = load(pointers, p)
        source = 0
        while source < LENGTH_OF and load(data, source) != load(block, word):
            source += 1
        if load(block, word) != 0 and word != inside:
            count = _place(places, count, word, source, 0)
            n = n if source < LENGTH_OF and count <= PLACES_MOST else 0
        p += 1
    if n and load(head, SIZE) <= BLOCK and load(head, TABLED) <= TABLE:
        move(shift(entry, GIVEN), block, load(head, SIZE))
        move(shift(entry, LISTED), table, load(head, TABLED))
        store(entry, PLACES, count)
        store(entry, LENGTH, n)
    scratch[0] = 0


_TYPES = "i64 int int int int" + " object" * TENSORS + " double" * NUMBERS
again, keep = (
    Kernel(_again, _TYPES, gil=True),
    Kernel(_keep, _TYPES + " i64 i64 i64 int int i64 int int int int", gil=True),
)


@cache
def reader() -> int:
    """Where torch has DLPack's ``dltensor_from_py_object_no_sync``; 0: it has none, or calls could be read at once."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        api = pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    except (AttributeError, ValueError):
        return 0
    # Two numbers of 32 bits, then pointers: to an older version, what allocates, makes a tensor, gives one, and this.
    if ctypes.c_uint32.from_address(api).value != 1:
        return 0
    return ctypes.c_uint64.from_address(api + 40).value


class Call(NamedTuple):
    """A call that was new: how it is made is left where `Memo.start` will find it."""

    memo: Memo
    given: tuple[Any, ...]
    table: array[int] | None = None
    """What a kernel reads beside tensors."""
    room: tuple[int, int, int, int] = (0, 0, 0, 0)
    """What it needs while it runs: how many fp32 and int64, which are 0 at first, and where they are this time."""
    inside: tuple[str, int, int] | None = None
    """Its argument that points into a tensor: which one, how many bytes behind the begin. Others point to begins."""

    def keep(self, kernel: Kernel, variant: tuple[str, ...], args: tuple[Any, ...], threads: int, team: int) -> None:
        """It was made by ``kernel(*variant)(*args)``, in so many threads of OpenMP's `team`."""
        if not reader():
            return
        caller, block = kernel.block(variant, args)
        table = self.table or _empty
        floats, counts, *rooms = self.room
        head = array("q", (0, caller, team, threads, len(block), 0, len(table), floats, counts))
        length = kernel.words[GROWS] if self.given[2] >= 0 else 0
        word, *where = self.inside or ("", 0, 0)
        told = (a.buffer_info()[0] for a in (head, block, table))
        pointers = kernel.pointers.buffer_info()[0], length, kernel.words.get(word, 0)
        self.memo.keep(self.given, *told, *rooms, *pointers, *where)


_empty = array("q")


class Memo:
    """The last calls of an op, by their layouts."""

    def __init__(self) -> None:
        self.memory, self.next = array("q", bytes(8 * ENTRIES * ENTRY)), 0
        self._again: Callable[..., int] = self._first
        _memos.append(self)

    def start(
        self, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], telling: int = 0, grows: int = -1
    ) -> Call | None:
        """Makes the call, if one like it has been made. None: it is done; else it is new, for `run` to keep.

        Args:
            numbers: all else that decides what is done, but for torch's threads.
            telling: bit i: the elements of tensor i do too.
            grows: of this tensor no more than `about` its length does; the kernel takes that as `GROWS`.

        Raises:
            MemoryError: a kernel had none for what it needs beside its arguments.
        """
        rest, zeros = NONE[len(tensors)], ZERO[len(numbers)]
        given = (torch.get_num_threads(), telling, grows, *tensors, *rest, *numbers, *zeros)
        return None if self._again(*given) else Call(self, given)

    def _first(self, *args: Any) -> int:
        where = self.memory.buffer_info()[0], reader()
        self._again = partial(again(), *where) if reader() else lambda *_: NEW
        return self._again(*args)

    def keep(self, given: tuple[Any, ...], *told: int) -> None:
        self.next = (self.next + 1) % ENTRIES
        keep()(self.memory.buffer_info()[0] + 8 * ENTRY * self.next, reader(), *given, *told)

    def forget(self) -> None:
        for entry in range(0, ENTRIES * ENTRY, ENTRY):
            self.memory[entry + LENGTH] = 0


NONE, ZERO = [(None,) * (TENSORS - n) for n in range(TENSORS + 1)], [(0.0,) * (NUMBERS - n) for n in range(NUMBERS + 1)]
_memos: list[Memo] = []


def forget() -> None:
    """All calls of all ops are new."""
    for memo in _memos:
        memo.forget()


os.register_at_fork(after_in_child=forget)
