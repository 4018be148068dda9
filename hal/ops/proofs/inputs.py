"""What the ops' `make` functions share: seeded tensors, odd index values, views that overlap nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.kv.pool import KVPool
from hal.ops.spec import ErrorSample, Sample

INDEX_DTYPES = {"i32": torch.int32, "i64": torch.int64}
FLOAT_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
DTYPES = ("fp16", "bf16", "fp32")

FAR = 2**29 + 64
"""A row stride that puts the fifth row beyond 2^31 elements."""


def generator(seed: int) -> torch.Generator:
    """A generator of the CPU, seeded."""
    return torch.Generator().manual_seed(seed)


def randint(g: torch.Generator, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """int64 in [low, high); zeros where the interval is empty."""
    if high <= low:
        return _host.zeros(shape, dtype=torch.int64)
    return _host.randint(low, high, shape, generator=g)


def floats(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, specials: bool = False) -> Tensor:
    """Normal numbers; with `specials`, a few NaN, +-Inf, zeros and subnormals among them."""
    x = _host.randn(shape, generator=g)
    if specials and x.numel():
        flat = x.view(-1)
        odd = _host.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-7, 500.0, -70000.0])
        where = _host.randint(0, flat.numel(), (max(8, flat.numel() // 16),), generator=g)
        flat[where] = odd[_host.arange(where.numel()) % odd.numel()]
    return x.to(dtype)


def of_dtypes(names: str, *rows: str) -> list[Sample]:
    """A sample for each row of index dtypes, the values of `names` in order: ``"i32 i64"`` is ``i32-i64``."""
    found = []
    for row in rows:
        dtypes = [None if d == "None" else d for d in row.split()]
        found.append(Sample(row.replace(" ", "-"), dict(zip(names.split(), dtypes, strict=True))))
    return found


def spans(g: torch.Generator, bs: int, width: int, longest: int, skew: bool) -> tuple[Tensor, Tensor]:
    """(where in a row of `width` each request's part begins, how long it is: with `skew` all but one of none)."""
    length = randint(g, 0, min(longest, width) + 1, (bs,))
    if skew and bs:
        length.zero_()
        length[bs // 2] = min(longest, width)
    return (_host.rand(bs, generator=g) * (width + 1 - length)).to(torch.int64), length


def odd_indices(index: Tensor, limit: int, kind: str, dtype: torch.dtype, by: int = 0) -> Tensor:
    """`index` in `dtype`, with a part of it made odd.

    ``valid`` as it is; ``skip`` every other one -1; ``none`` all -1; ``edge`` the values just outside and
    just inside [0, limit); ``extreme`` also the smallest and largest of the dtype; ``equal`` all the same.
    by: places by which what has ``edge`` or ``extreme`` values is rolled on, so that they meet valid ones elsewhere.
    """
    out = index.clone()
    info = torch.iinfo(dtype)
    n = out.numel()
    if kind == "skip":
        out[::2] = -1
    elif kind == "none":
        out.fill_(-1)
    elif kind == "equal":
        out = out[:1].expand(n).clone()
    elif kind in ("edge", "extreme"):
        odd = [limit, -1, limit - 1, 0, limit + 1, -2]
        if kind == "extreme":
            odd = [info.max, info.min, limit, info.max - 1, -1, info.min + 1, limit - 1]
            if dtype == torch.int64:
                odd += [2**31, 2**32, 2**32 + 1, -(2**32)]
        for i, value in enumerate(odd):
            if 2 * i < n:
                out[2 * i] = value
    elif kind != "valid":
        raise ValueError(f"kind of indices: {kind!r}")
    return out.to(dtype).roll(by if kind in ("edge", "extreme") else 0)


def row_view(rows: Tensor, kind: str) -> Tensor:
    """`rows` [n, m] as ``plain``; a ``strided`` view into wider rows; ``far``: rows 2^29 elements apart."""
    if kind == "plain":
        return rows
    n, m = rows.shape
    wide = m + 13 if kind == "strided" else FAR
    view = _host.empty_strided((n, m), (wide, 1), dtype=rows.dtype)
    view.copy_(rows)
    return view


def spaced(t: Tensor, kind: str) -> Tensor:
    """`t` as ``plain``; ``padded``, with odd strides; ``far``: what its first dim counts 2^29 elements apart."""
    if kind == "plain":
        return t
    strides, step = list(t.stride()), t.shape[-1] + 8
    if kind == "far":
        strides[0] = FAR
    else:
        for i in range(t.ndim - 2, -1, -1):
            strides[i] = step
            step = step * t.shape[i] + 16
    return _host.empty_strided(tuple(t.shape), tuple(strides), dtype=t.dtype).copy_(t)


def paired(
    g: torch.Generator, lead: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Caches of k and v that are interleaved in one tensor, as vLLM keeps them."""
    both = _host.randn(lead[0], 2, *lead[1:], max(dims), generator=g).to(dtype)
    return both[:, 0, ..., : dims[0]], both[:, 1, ..., : dims[1]]


def on_device(arguments: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """What `make` gave on a device, views of one storage still views of one storage."""
    stores: dict[int, Tensor] = {}

    def place(value: Any) -> Any:
        if isinstance(value, KVPool):
            k, v = (tuple(map(place, h)) if isinstance(h, tuple) else place(h) for h in (value.k, value.v))
            return KVPool(k, v, layout=value.layout, page_size=value.page_size)
        if not isinstance(value, Tensor):
            return value
        store = value.untyped_storage()
        if store.data_ptr() not in stores:
            stores[store.data_ptr()] = _host.empty(0, dtype=torch.uint8).set_(store).to(device)
        base = stores[store.data_ptr()]
        view = torch.empty(0, dtype=value.dtype, device=base.device)
        return view.set_(base.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    return {name: place(value) for name, value in arguments.items()}


def refused(make: Callable[..., dict[str, Any]], **params: Any) -> Callable[..., ErrorSample]:
    """What makes a sample of `make`'s arguments that must be refused for the first that is given it: its name, and what
    some arguments are instead, a function's result where it is one."""

    def bad(name: str, **change: Any) -> ErrorSample:
        def arguments() -> dict[str, Any]:
            return {**make(**params), **{n: x() if callable(x) else x for n, x in change.items()}}

        return ErrorSample(name, next(iter(change)), arguments)

    return bad
