"""kv_move for Ascend: rows of a pool to other slots of it, as if every read came before every write.

`kv_transfer`'s kernel, twice: to `workspace`, where pair i has row i whatever its slots, and from there to where they
go, as many layers at a time as it holds. On one stream the second launch begins when the first is done, so no order
of the pairs matters.
"""

from torch import Tensor

from hal.backends.ascend.kv_transfer import through
from hal.kv.pool import KVPool


def kv_move(
    pool: KVPool, src_slots: Tensor, dst_slots: Tensor, workspace: Tensor, *, layers: range | None = None
) -> None:
    """The contract is `hal.ops.kv_move`'s."""
    todo = range(pool.num_layers) if layers is None else layers
    n = src_slots.shape[0]
    if n == 0 or pool.num_slots == 0:
        return
    # zip ends with the planes: there is none for v where v is None.
    for half, plane in zip((pool.k, pool.v), pool.planes(), strict=False):
        assert half is not None
        step = workspace.shape[0] // (n * plane.row_bytes)
        for first in range(todo.start, todo.stop, step):
            some = range(first, min(first + step, todo.stop))
            rows = workspace[: len(some) * n * plane.row_bytes].view(len(some), n, plane.row_bytes)
            through(pool, half, rows, src_slots, dst_slots, some)
