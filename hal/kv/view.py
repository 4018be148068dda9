"""How a kernel addresses a paged cache: ``[slots, *row]``, or ``[pages, page_size, *row]`` with any strides but the
last dim's; a row is ``[heads, dim]``, or ``[dim]`` where MLA keeps one joint row a token.

Example:
    >>> import torch
    >>> cache = torch.zeros(4, 16, 2, 64, dtype=torch.float16)
    >>> count_slots(cache), page_size(cache), strides(cache)
    (64, 16, (2048, 128, 64))
    >>> fuse_pages(cache)
    (1, (128, 0, 64))
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Strides = tuple[int, int, int]
"""Elements from page to page, from token to token in a page, and from head to head; 0 for what there is not."""


def count_slots(cache: Tensor, row_dims: int = 2) -> int:
    shape = cache.shape
    return shape[0] * shape[1] if len(shape) > row_dims + 1 else shape[0]


def page_size(cache: Tensor, row_dims: int = 2) -> int:
    """1 where the cache has no pages."""
    return cache.shape[1] if cache.ndim > row_dims + 1 else 1


def strides(cache: Tensor, row_dims: int = 2) -> Strides:
    """Where there are no pages, a page is one token."""
    st = cache.stride()
    head = st[-2] if row_dims == 2 else 0
    return (st[0], st[1], head) if len(st) > row_dims + 1 else (st[0], 0, head)


def fuse_pages(cache: Tensor, row_dims: int = 2) -> tuple[int, Strides]:
    """`page_size` and `strides`, as if there were no pages where they follow each other without a gap: a kernel
    then divides no slot."""
    page, (far, near, head) = page_size(cache, row_dims), strides(cache, row_dims)
    return (1, (near, 0, head)) if near and far == page * near else (page, (far, near, head))


def fuse_pages_of_both(k_cache: Tensor, v_cache: Tensor) -> tuple[int, Strides, Strides]:
    """`fuse_pages` of two caches of one page size, for a kernel that finds a slot once: both or neither."""
    (page, k), (v_page, v) = fuse_pages(k_cache), fuse_pages(v_cache)
    if page == v_page:
        return page, k, v
    return page_size(k_cache), strides(k_cache), strides(v_cache)


def copy_unit(steps: Iterable[int]) -> int:
    """The largest of 16, 8 and 1 elements that divides all `steps`: a kernel that gets them in such units knows how its
    rows are aligned."""
    steps = tuple(steps)
    return next(unit for unit in (16, 8, 1) if all(step % unit == 0 for step in steps))
