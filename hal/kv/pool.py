"""`KVPool`: the KV cache of all layers as `kv_transfer` sees it, and an allocator of its slots.

A pool is a description, not a copy: it holds the engine's own tensors and says how a (layer, slot)
is found in them. Layout names are SGLang's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal import _host, _memory
from hal._errors import ArgumentError, HalError

LAYOUTS: dict[str, str] = {
    "layer_first": "[L, S, *row], or L tensors [S, *row]",
    "page_first": "[S, L, *row]",
    "page_first_direct": "[P, L, page_size, *row]",
    "page_head": "[P, H, page_size, L, D]",
}
"""Layout name -> shape. L layers, S slots, P pages, row = (H, D), (1, D) or (D,)."""


@dataclass(frozen=True)
class Plane:
    """How a kernel addresses one half (k or v) of a pool. All strides in bytes.

    Chunk c of slot s in layer l starts at
    ``bases[l] + (s // page_size) * page_stride + (s % page_size) * token_stride + c * chunk_stride``
    and is ``chunk_bytes`` contiguous bytes. A token row is ``chunks`` chunks: 1, except H in page_head.
    """

    bases: tuple[int, ...]
    page_stride: int
    token_stride: int
    chunks: int
    chunk_stride: int
    chunk_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.chunks * self.chunk_bytes


def _bad(argument: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError("KVPool", argument, expected, got)


class KVPool:
    """The keys and values of all layers, in one of four layouts.

    Args:
        k: the keys, or MLA's joint rows: one tensor of ``LAYOUTS[layout]``'s shape, or, for
            ``layer_first`` alone, a sequence of L tensors ``[S, *row]``. A token's row (``page_head``: its
            D elements) is contiguous; every other stride is free. Any dtype.
        v: the values, like `k` but for the last dim, or None (MLA).
        layout: a key of `LAYOUTS`.
        page_size: consecutive slots in a page, >= 1. In the paged layouts it is the tensor's own.

    Raises:
        ArgumentError: a shape, dtype, device or stride that does not fit the layout.

    Example:
        >>> k = torch.zeros(2, 64, 4, 8)
        >>> pool = KVPool(k, torch.zeros_like(k), layout="layer_first", page_size=16)
        >>> pool.num_layers, pool.num_slots, pool.row_shape
        (2, 64, (4, 8))
        >>> host = KVPool.host_like(pool, slots=128, layout="page_first")
        >>> host.k.shape
        torch.Size([128, 2, 4, 8])
    """

    __slots__ = (
        "_addresses",
        "_planes", "device", "dtype", "k", "key", "layout", "num_layers", "num_slots", "page_size", "pinned",
        "row_shape", "tensors", "v", "v_row_shape",
    )  # fmt: skip

    k: Tensor | tuple[Tensor, ...]
    v: Tensor | tuple[Tensor, ...] | None
    tensors: tuple[Tensor, ...]
    """All of k, then all of v."""

    def __init__(
        self,
        k: Tensor | Sequence[Tensor],
        v: Tensor | Sequence[Tensor] | None = None,
        layout: str = "layer_first",
        page_size: int = 1,
    ) -> None:
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise _bad("layout", "one of " + ", ".join(LAYOUTS), repr(layout))
        for name, half in (("k", k), ("v", v)):
            if not isinstance(half, Tensor | Sequence) and not (half is None and name == "v"):
                raise _bad(name, "a tensor or a sequence of tensors", _describe(half))
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise _bad("page_size", "an int >= 1", repr(page_size))
        self.layout = layout
        self.page_size = page_size
        self.k = k if isinstance(k, Tensor) else tuple(k)
        self.v = v if isinstance(v, Tensor) or v is None else tuple(v)
        self.tensors = tuple(t for half in (self.k, self.v) if half is not None for t in _tensors(half))
        for i, t in enumerate(self.tensors):
            self._check_memory("k" if i < (len(self.k) if isinstance(self.k, tuple) else 1) else "v", t)
        self.num_layers, self.num_slots, self.row_shape = self._check("k", self.k)
        first = self.k if isinstance(self.k, Tensor) else self.k[0]
        self.dtype, self.device = first.dtype, first.device
        self.v_row_shape: tuple[int, ...] | None = None
        if self.v is not None:
            layers, slots, self.v_row_shape = self._check("v", self.v)
            first_v = self.v if isinstance(self.v, Tensor) else self.v[0]
            if (layers, slots, self.v_row_shape[:-1]) != (
                self.num_layers,
                self.num_slots,
                self.row_shape[:-1],
            ):
                raise _bad("v", f"k's shape but for the last dim, {_shape(self.k)}", _shape(self.v))
            if (first_v.dtype, first_v.device) != (self.dtype, self.device):
                raise _bad(
                    "v", f"{self.dtype} on {self.device}, like k", f"{first_v.dtype} on {first_v.device}"
                )
        self.pinned = (
            self.device.type == "cpu"
            and self.num_slots > 0
            and all(t.is_pinned() for half in (self.k, self.v) if half is not None for t in _tensors(half))
        )
        self._addresses = [t.data_ptr() for t in self.tensors]
        self._planes = tuple(self._plane(half) for half in (self.k, self.v) if half is not None)
        self.key = (
            layout, self.device, self.dtype, page_size, self.row_shape, self.v_row_shape, self.num_layers,
            isinstance(self.k, tuple), self.pinned,
        )  # fmt: skip
        """What selection may know of the pool: never the number of slots."""

    @staticmethod
    def _check_memory(name: str, t: Any) -> None:
        if not isinstance(t, Tensor):
            return
        why = _memory.flaw(t)
        if why is None and t.numel():
            span = 1 + sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True))
            if (t.storage_offset() + span) * t.element_size() > t.untyped_storage().nbytes():
                why = "a tensor larger than its storage, which has been resized"
        if why is not None:
            raise _bad(name, "tensors whose values are in memory", why)

    def _check(self, name: str, half: Tensor | tuple[Tensor, ...]) -> tuple[int, int, tuple[int, ...]]:
        """(layers, slots, row shape) of one half, or an error."""
        want = LAYOUTS[self.layout]
        if isinstance(half, tuple):
            if self.layout != "layer_first":
                raise _bad(name, f"one tensor {want} for layout {self.layout}", f"{len(half)} tensors")
            if not half or not all(isinstance(t, Tensor) for t in half):
                raise _bad(name, "a tensor or a non-empty sequence of tensors", _describe(half))
            one = half[0]
            for i, t in enumerate(half):
                if (t.shape, t.dtype, t.device, t.stride()) != (
                    one.shape,
                    one.dtype,
                    one.device,
                    one.stride(),
                ):
                    raise _bad(f"{name}[{i}]", f"layer 0's {_describe(one)}", _describe(t))
            shape, strides = (len(half), *one.shape), (1, *one.stride())
        else:
            shape, strides = tuple(half.shape), half.stride()
        ranks = {"layer_first": (3, 4), "page_first": (3, 4), "page_first_direct": (4, 5), "page_head": (5,)}
        if len(shape) not in ranks[self.layout]:
            raise _bad(name, f"{want} for layout {self.layout}", _shape(half))
        # A layer each has its own storage: 1 stands for how far apart they are.
        own = slice(1, None) if isinstance(half, tuple) else slice(None)
        if _memory.overlaps(shape[own], strides[own]):
            raise _bad(name, "no two elements in one place", f"strides {tuple(strides)}")
        lead = {"layer_first": 2, "page_first": 2, "page_first_direct": 3, "page_head": 4}[self.layout]
        inner = 1
        for n, st in zip(reversed(shape[lead:]), reversed(strides[lead:]), strict=True):
            if n != 1 and st != inner:
                what = "last dim" if self.layout == "page_head" else "token row (what follows layer and slot)"
                raise _bad(name, f"a contiguous {what}", f"shape {_shape(half)}, strides {tuple(strides)}")
            inner *= n
        if self.layout == "layer_first":
            return shape[0], shape[1], shape[2:]
        if self.layout == "page_first":
            return shape[1], shape[0], shape[2:]
        if self.layout == "page_first_direct":
            pages, layers, page, row = shape[0], shape[1], shape[2], shape[3:]
        else:
            pages, layers, page, row = shape[0], shape[3], shape[2], (shape[1], shape[4])
        if page != self.page_size:
            raise _bad(
                "page_size", f"{page}, which the tensor's shape {_shape(half)} says", str(self.page_size)
            )
        return layers, pages * page, row

    def _plane(self, half: Tensor | tuple[Tensor, ...]) -> Plane:
        item = self.dtype.itemsize
        if isinstance(half, tuple):
            st = tuple(s * item for s in half[0].stride())
            bases = tuple(t.data_ptr() for t in half)
            row = math.prod(half[0].shape[1:]) * item
            return Plane(bases, self.page_size * st[0], st[0], 1, row, row)
        st = tuple(s * item for s in half.stride())
        base = half.data_ptr()
        layer_dim = {"layer_first": 0, "page_first": 1, "page_first_direct": 1, "page_head": 3}[self.layout]
        bases = tuple(base + i * st[layer_dim] for i in range(self.num_layers))
        if self.layout == "page_head":
            return Plane(bases, st[0], st[2], half.shape[1], st[1], half.shape[4] * item)
        if self.layout == "page_first_direct":
            row = math.prod(half.shape[3:]) * item
            return Plane(bases, st[0], st[2], 1, row, row)
        slot_dim = 1 - layer_dim
        row = math.prod(half.shape[2:]) * item
        return Plane(bases, self.page_size * st[slot_dim], st[slot_dim], 1, row, row)

    def planes(self) -> tuple[Plane, ...]:
        """One `Plane` for k and, unless v is None, one for v: all that a copying kernel needs to know.

        Raises:
            ArgumentError: the tensors have moved to memory that is not what this pool says (freed, unpinned, of
                another shape or device).
        """
        if [t.data_ptr() for t in self.tensors] != self._addresses:
            self._follow()
        return self._planes

    def _follow(self) -> None:
        """The addresses anew: ``share_memory_()``, sending to a process, ``set_`` and resizing move tensors."""
        made = KVPool(self.k, self.v, self.layout, self.page_size)
        if (made.key, made.num_slots) != (self.key, self.num_slots):
            name = "pinned" if made.pinned != self.pinned else "shape, dtype or device"
            raise _bad("k", f"{self}, pinned {self.pinned}, as it was made", f"{made}, pinned {made.pinned}: its "
                       f"tensors have been given other memory ({name}); make a new KVPool")  # fmt: skip
        self._planes, self._addresses = made._planes, made._addresses

    def __reduce__(self) -> tuple[Any, ...]:
        # What a copy or another process gets has addresses of its own.
        return type(self), (self.k, self.v, self.layout, self.page_size)

    @property
    def requires_grad(self) -> bool:
        """Whether one of `tensors` requires grad."""
        for t in self.tensors:  # noqa: SIM110 - on every call under grad mode, and a generator takes twice as long
            if t.requires_grad:
                return True
        return False

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Layer `index` as views ``(k, v)`` indexed by slot.

        ``[S, *row]`` in layer_first and page_first, ``[P, page_size, *row]`` in page_first_direct,
        ``[P, page_size, H, D]`` (strided) in page_head: what ``rope_kv_write`` takes as its caches.
        """

        def view(half: Tensor | tuple[Tensor, ...]) -> Tensor:
            if isinstance(half, tuple) or self.layout == "layer_first":
                return half[index]
            if self.layout == "page_head":
                return half[:, :, :, index].transpose(1, 2)
            return half[:, index]

        return view(self.k), None if self.v is None else view(self.v)

    @classmethod
    def host_like(
        cls, pool: KVPool, slots: int, layout: str = "page_first", page_size: int | None = None
    ) -> KVPool:
        """A host pool for the same rows as `pool`, pinned where an accelerator is there to need it.

        Args:
            pool: the pool whose layers, rows and dtype to match.
            slots: capacity in tokens, a multiple of the page size. The memory is zeroed.
            layout: of the new pool. ``page_first`` keeps all layers of a token together, so that
                consecutive slots coalesce into long copies.
            page_size: defaults to `pool`'s.

        Raises:
            ArgumentError: `slots` is no multiple of the page size, or `page_head` is asked for rows without heads.
        """
        page = pool.page_size if page_size is None else page_size
        if isinstance(page, bool) or not isinstance(page, int) or page < 1:
            raise _bad("page_size", "an int >= 1", repr(page))
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 0 or slots % page:
            raise _bad("slots", f"a multiple of page_size {page}", repr(slots))
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise _bad("layout", "one of " + ", ".join(LAYOUTS), repr(layout))
        if layout == "page_head" and len(pool.row_shape) != 2:
            raise _bad("layout", "a layout without a head dim, for rows without one", "'page_head'")

        def make(row: tuple[int, ...]) -> Tensor:
            n = pool.num_layers
            shape: tuple[int, ...]
            if layout == "page_head":
                shape = (slots // page, row[0], page, n, row[1])
            elif layout == "page_first_direct":
                shape = (slots // page, n, page, *row)
            else:
                shape = (slots, n, *row) if layout == "page_first" else (n, slots, *row)
            # Only the fp8 dtypes lack a zero fill on some builds; bytes always have one.
            raw = _host.zeros(
                (*shape[:-1], shape[-1] * pool.dtype.itemsize), dtype=torch.uint8, pin_memory=_pinning()
            )
            return raw.view(pool.dtype)

        v = None if pool.v_row_shape is None else make(pool.v_row_shape)
        return cls(make(pool.row_shape), v, layout=layout, page_size=page)

    def __repr__(self) -> str:
        row = "x".join(map(str, self.row_shape))
        half = "k" if self.v is None else "k+v"
        return (
            f"KVPool({half}, {self.layout}, layers={self.num_layers}, slots={self.num_slots}, row={row}, "
            f"page_size={self.page_size}, {str(self.dtype).removeprefix('torch.')}@{self.device})"
        )


class SlotAllocator:
    """Hands out the slots of a pool, whole pages, the longest consecutive runs it can.

    Consecutive host slots are what lets `kv_transfer` move many tokens in one copy. Best fit: the
    smallest free run that holds the request, and only if there is none, several runs, longest first.

    Args:
        num_slots: capacity in tokens; what exceeds a whole number of pages is never handed out.
        page_size: every allocation is rounded up to whole pages.

    Example:
        >>> allocator = SlotAllocator(num_slots=64, page_size=16)
        >>> slots = allocator.alloc(20)
        >>> slots.tolist() == list(range(20))
        True
        >>> allocator.free(slots); allocator.available
        64
    """

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        for name, value, least in (("num_slots", num_slots, 0), ("page_size", page_size, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError("SlotAllocator", name, f"an int >= {least}", repr(value))
        self.page_size = page_size
        self._pages = num_slots // page_size
        self._runs: dict[int, int] = {0: self._pages} if self._pages else {}
        self._ends: dict[int, int] = {self._pages: 0} if self._pages else {}
        self._used = bytearray(self._pages)

    @property
    def available(self) -> int:
        """Free slots."""
        return sum(self._runs.values()) * self.page_size

    def alloc(self, tokens: int) -> Tensor:
        """`tokens` slots as an int64 CPU tensor; the rest of the last page stays reserved with them.

        Raises:
            HalError: fewer slots are free; nothing is taken.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ArgumentError("SlotAllocator", "tokens", "an int >= 0", repr(tokens))
        need = -(-tokens // self.page_size)
        if need > sum(self._runs.values()):
            raise HalError(
                f"hal: SlotAllocator: {tokens} slots asked for, {self.available} free; free some first"
            )
        taken: list[tuple[int, int]] = []
        while need:
            fitting = [start for start, n in self._runs.items() if n >= need]
            start = (
                min(fitting, key=lambda s: (self._runs[s], s))
                if fitting
                else max(self._runs, key=lambda s: (self._runs[s], -s))
            )
            n = min(need, self._runs[start])
            self._take(start, n)
            taken.append((start, n))
            need -= n
        page = self.page_size
        runs = [_host.arange(s * page, (s + n) * page) for s, n in taken]
        return torch.cat(runs)[:tokens] if runs else _host.empty(0, dtype=torch.int64)

    def free(self, slots: Tensor) -> None:
        """Gives back the pages that hold `slots` (-1 is ignored).

        Raises:
            ArgumentError: a slot outside the pool, or in a page that is free already; nothing is freed.
        """
        pages = sorted({int(s) // self.page_size for s in slots.tolist() if s != -1})
        for p in pages:
            if not 0 <= p < self._pages:
                top = self._pages * self.page_size
                raise ArgumentError("SlotAllocator", "slots", f"slots in [0, {top})", f"a slot of page {p}")
            if not self._used[p]:
                raise ArgumentError(
                    "SlotAllocator", "slots", "slots in use", f"page {p}, which is free already"
                )
        for p in pages:
            self._give(p, 1)

    def _take(self, start: int, n: int) -> None:
        length = self._runs.pop(start)
        del self._ends[start + length]
        if length > n:
            self._runs[start + n] = length - n
            self._ends[start + length] = start + n
        self._used[start : start + n] = b"\1" * n

    def _give(self, start: int, n: int) -> None:
        self._used[start : start + n] = bytes(n)
        end = start + n
        if end in self._runs:
            length = self._runs.pop(end)
            end += length
        if start in self._ends:
            start = self._ends.pop(start)
        self._runs[start] = end - start
        self._ends[end] = start


def _tensors(half: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return half if isinstance(half, tuple) else (half,)


def _shape(half: Any) -> str:
    if isinstance(half, tuple):
        return f"{len(half)} x {list(half[0].shape)}"
    return str(list(half.shape))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{name}{list(value.shape)}@{value.device} strides {value.stride()}"
    if isinstance(value, tuple):
        return "(" + ", ".join(type(t).__name__ for t in value) + ")"
    return type(value).__name__


def _pinning() -> bool:
    npu = getattr(torch, "npu", None)
    return torch.cuda.is_available() or bool(npu and npu.is_available())
