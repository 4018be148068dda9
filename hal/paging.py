"""`num_new_pages`: on the host, what `alloc_extend` and `alloc_decode` will take, before they are called."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._spans import check_page_size, extent


def num_new_pages(
    prefix_lens: Tensor | Sequence[int], seq_lens: Tensor | Sequence[int], page_size: int
) -> int:
    """The pages that requests with `prefix_lens` tokens need to grow to `seq_lens`, as `alloc_extend` counts them.

    For `alloc_decode` the prefix is ``seq_lens - 1``. Nothing is asked of a device, so there is nothing to wait for.

    Args:
        prefix_lens: ``[bs]`` ints: a sequence, or a CPU tensor.
        seq_lens: likewise, as many.
        page_size: slots in a page, 1 to 2^30.

    Raises:
        ArgumentError: a tensor on a device, lengths that disagree, a wrong page size.

    Example:
        >>> import hal
        >>> hal.num_new_pages([2, 0, 4], [5, 3, 4], page_size=4)
        2
    """
    check_page_size("num_new_pages", page_size)
    lists = []
    for name, lens in (("prefix_lens", prefix_lens), ("seq_lens", seq_lens)):
        if isinstance(lens, Tensor):
            if not lens.is_cpu or lens.ndim != 1 or lens.is_floating_point():
                raise ArgumentError(
                    "num_new_pages",
                    name,
                    "[bs] ints on the CPU",
                    f"{lens.dtype}{list(lens.shape)}@{lens.device}",
                )
            lens = lens.tolist()
        lists.append(lens)
    if len(lists[0]) != len(lists[1]):
        raise ArgumentError(
            "num_new_pages", "seq_lens", f"{len(lists[0])} lengths, like prefix_lens", str(len(lists[1]))
        )
    spans = (extent(p, s) for p, s in zip(*lists, strict=True))
    return sum(-(-s // page_size) - -(-p // page_size) for p, s in spans)
