"""`KVPool`: the KV cache of all layers as `kv_transfer` sees it.

A pool is a description, not a copy: it holds the engine's own tensors and says how a (layer, slot)
is found in them. Layout names are SGLang's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal import _host, _memory
from hal._errors import ArgumentError

LAYOUTS: dict[str, str] = {
    "layer_first": "[L, S, *row], or L tensors [S, *row]",
    "page_first": "[S, L, *row]",
    "page_first_direct": "[P, L, page_size, *row]",
    "page_head": "[P, H, page_size, L, D]",
}
"""Layout name -> shape. L layers, S slots, P pages, row = (H, D), (1, D) or (D,)."""


class _Dims(NamedTuple):
    """Which dim of a layout's tensor is what; `row` and all behind it are contiguous."""

    layer: int
    token: int
    row: int
    ranks: tuple[int, ...]
    page: int | None = None
    head: int | None = None


_DIMS = {
    "layer_first": _Dims(layer=0, token=1, row=2, ranks=(3, 4)),
    "page_first": _Dims(layer=1, token=0, row=2, ranks=(3, 4)),
    "page_first_direct": _Dims(layer=1, token=2, row=3, ranks=(4, 5), page=0),
    "page_head": _Dims(layer=3, token=2, row=4, ranks=(5,), page=0, head=1),
}


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
        "_extents",
        "_planes",
        "device",
        "dtype",
        "k",
        "key",
        "layout",
        "num_layers",
        "num_slots",
        "page_size",
        "pinned",
        "row_shape",
        "tensors",
        "v",
        "v_row_shape",
    )

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
            if (layers, slots, self.v_row_shape[:-1]) != (self.num_layers, self.num_slots, self.row_shape[:-1]):
                raise _bad("v", f"k's shape but for the last dim, {_shape(self.k)}", _shape(self.v))
            if (first_v.dtype, first_v.device) != (self.dtype, self.device):
                raise _bad("v", f"{self.dtype} on {self.device}, like k", f"{first_v.dtype} on {first_v.device}")
        self.pinned = (
            self.device.type == "cpu"
            and self.num_slots > 0
            and all(t.is_pinned() for half in (self.k, self.v) if half is not None for t in _tensors(half))
        )
        self._extents = self._memory()
        self._planes = tuple(self._plane(half) for half in (self.k, self.v) if half is not None)
        self.key = (
            layout,
            self.device,
            self.dtype,
            page_size,
            self.row_shape,
            self.v_row_shape,
            self.num_layers,
            isinstance(self.k, tuple),
            self.pinned,
        )
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
                if (t.shape, t.dtype, t.device, t.stride()) != (one.shape, one.dtype, one.device, one.stride()):
                    raise _bad(f"{name}[{i}]", f"layer 0's {_describe(one)}", _describe(t))
            shape, strides = (len(half), *one.shape), (1, *one.stride())
        else:
            shape, strides = tuple(half.shape), half.stride()
        dims = _DIMS[self.layout]
        if len(shape) not in dims.ranks:
            raise _bad(name, f"{want} for layout {self.layout}", _shape(half))
        # A layer each has its own storage: 1 stands for how far apart they are.
        own = slice(1, None) if isinstance(half, tuple) else slice(None)
        if _memory.overlaps(shape[own], strides[own]):
            raise _bad(name, "no two elements in one place", f"strides {tuple(strides)}")
        inner = 1
        for n, st in zip(reversed(shape[dims.row :]), reversed(strides[dims.row :]), strict=True):
            if n != 1 and st != inner:
                what = "last dim" if self.layout == "page_head" else "token row (what follows layer and slot)"
                raise _bad(name, f"a contiguous {what}", f"shape {_shape(half)}, strides {tuple(strides)}")
            inner *= n
        row = shape[dims.row :] if dims.head is None else (shape[dims.head], *shape[dims.row :])
        layers, page = shape[dims.layer], shape[dims.token]
        if dims.page is None:
            return layers, page, row
        if page != self.page_size:
            raise _bad("page_size", f"{page}, which the tensor's shape {_shape(half)} says", str(self.page_size))
        return layers, shape[dims.page] * page, row

    def _plane(self, half: Tensor | tuple[Tensor, ...]) -> Plane:
        dims, item = _DIMS[self.layout], self.dtype.itemsize
        if isinstance(half, tuple):
            bases = tuple(t.data_ptr() for t in half)
            shape, steps = (len(half), *half[0].shape), (0, *half[0].stride())
        else:
            shape, steps = tuple(half.shape), half.stride()
            bases = tuple(half.data_ptr() + i * steps[dims.layer] * item for i in range(self.num_layers))
        token, size = steps[dims.token] * item, math.prod(shape[dims.row :]) * item
        page = self.page_size * token if dims.page is None else steps[dims.page] * item
        if dims.head is None:
            return Plane(bases, page, token, 1, size, size)
        return Plane(bases, page, token, shape[dims.head], steps[dims.head] * item, size)

    def planes(self) -> tuple[Plane, ...]:
        """One `Plane` for k and, unless v is None, one for v: all that a copying kernel needs to know.

        Raises:
            ArgumentError: the tensors have moved to memory that is not what this pool says (freed, unpinned, of
                another shape or device).
        """
        if self._memory() != self._extents:
            self._follow()
        return self._planes

    def _memory(self) -> list[tuple[int, int]]:
        """Address of each tensor and bytes of its storage: what is resized may be smaller at the same place."""
        return [(t.data_ptr(), t.untyped_storage().nbytes()) for t in self.tensors]

    def _follow(self) -> None:
        """The addresses anew: ``share_memory_()``, sending to a process, ``set_`` and resizing move tensors."""
        made = KVPool(self.k, self.v, self.layout, self.page_size)
        if (made.key, made.num_slots) != (self.key, self.num_slots):
            name = "pinned" if made.pinned != self.pinned else "shape, dtype or device"
            raise _bad(
                "k",
                f"{self}, pinned {self.pinned}, as it was made",
                f"{made}, pinned {made.pinned}: its tensors have been given other memory ({name}); make a new KVPool",
            )
        self._planes, self._extents = made._planes, made._extents

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

        dims = _DIMS[self.layout]

        def view(half: Tensor | tuple[Tensor, ...]) -> Tensor:
            if isinstance(half, tuple):
                return half[index]
            one = half.select(dims.layer, index)
            return one if dims.head is None else one.transpose(dims.head, dims.token)

        return view(self.k), None if self.v is None else view(self.v)

    @classmethod
    def host_like(cls, pool: KVPool, slots: int, layout: str = "page_first", page_size: int | None = None) -> KVPool:
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
            raw = _host.zeros((*shape[:-1], shape[-1] * pool.dtype.itemsize), dtype=torch.uint8, pin_memory=_pinning())
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
