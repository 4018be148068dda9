# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
"""Which tile an item of extend_attention's kernel for Hopper is.

Under TRITON_INTERPRET=1, which knows no Gluon: what looks for an item has layouts of its ranges alone, and is run as
Triton.
"""

import os
from itertools import accumulate
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from hal.backends.cuda import _turns

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1"
)
Q_HEADS, GROUP, TOKENS, N = 6, 3, 4, 16
BLOCKS = Q_HEADS // GROUP
BATCHES = {
    "one": [(11, 70)],
    "some": [(2, 40), (0, 9), (7, 7), (4, 300), (9, 20), (1, 0)],
    "many": [((5 * i + 2) % 11, 3 * i) for i in range(20)],
    "none": [(0, 5)] * 3,
}
"""New tokens and keys of each request."""


@triton.jit
def ask(
    qo, kv, to, n, nnz, bs, window, Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    FEW: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    batch = (qo, kv, tl.cast(n, tl.int64), tl.cast(nnz, tl.int64), bs)
    items, tile, lowest, low, high, begin, kv_head = _turns.find(
        item, batch, window, Q_HEADS, GROUP, BLOCKS, GROUP, TOKENS, N, CAUSAL, WINDOW, BLOCK, FEW, ROW
    )
    to += 10 * item
    tl.store(to, items)
    for i in tl.static_range(4):
        tl.store(to + 1 + i, tile[i])
    tl.store(to + 5, lowest)
    tl.store(to + 6, low)
    tl.store(to + 7, high)
    tl.store(to + 8, begin)
    tl.store(to + 9, kv_head)


class Language:
    """Gluon's, without layouts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)  # as the interpreter has it while it runs

    def arange(self, first: int, last: int, _: object) -> Any:
        return tl.arange(first, last)

    def associative_scan(self, x: Any, axis: int, _: object) -> Any:
        return tl.cumsum(x, axis)

    def to_tensor(self, x: int) -> Any:
        return tl.cast(x, tl.int32)


@pytest.fixture(autouse=True)
def as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in vars(_turns).copy().items():
        if isinstance(value, triton.JITFunction):
            monkeypatch.setattr(_turns, name, triton.jit(value.fn))
    monkeypatch.setattr(_turns, "tl", tl, raising=False)  # what the interpreter looks for
    monkeypatch.setattr(_turns, "gl", Language())
    monkeypatch.setattr(_turns, "_each", lambda _: None)


def asked(
    batch: list[tuple[int, int]],
    *,
    causal: bool = True,
    window: int = -1,
    block: int = 32,
    few: int = 16,
    row: int = 64,
) -> list[list[int]]:
    """Of all items: a tile's four numbers, the position of its first token, entries from and to, where its request's
    begin, key head."""
    news, keys = ([x[i] for x in batch] for i in range(2))
    qo, kv = (torch.tensor([0, *accumulate(x)], dtype=torch.int32, device="cpu") for x in (news, keys))

    def of_items(many: int) -> list[list[int]]:
        found = torch.full((many, 10), -7, dtype=torch.int64, device="cpu")
        ask[(many,)](
            qo, kv, found, sum(news), sum(keys), len(batch), window, Q_HEADS, GROUP, BLOCKS, TOKENS, N, causal,
            window >= 0, block, few, row,
        )  # fmt: skip
        return found.tolist()  # type: ignore[no-any-return]

    items = of_items(1)[0][0]
    found = of_items(items) if items else []
    assert all(x[0] == items for x in found)
    return [x[1:] for x in found]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"few": 4},
        {"few": 4, "block": 4},
        {"row": 2**22},
        {"causal": False},
        {"window": 5},
        {"window": 40, "few": 4, "block": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", BATCHES)
def test_items_are_all_tiles(batch: str, form: dict[str, Any]) -> None:
    """Of each block of heads, once, with the keys that some token sees; the last come first, unless the keys of all
    heads are more than the L2 holds."""
    requests = BATCHES[batch]
    causal, window = form.get("causal", True), form.get("window", -1)
    want = []
    token, begin = 0, 0
    for new, keys in requests:
        for t in range(0, new, TOKENS):
            rows = min(TOKENS, new - t)
            lowest = keys - new + t
            low = max(lowest - window, 0) // N * N if window >= 0 else 0
            high = min(keys, max(lowest + rows, 0)) if causal else keys
            for head in range(BLOCKS):
                want.append([token + t, rows, head * GROUP, GROUP, lowest, low, high, begin, head])
        token, begin = token + new, begin + keys
    found = asked(requests, **form)
    assert sorted(found) == want
    if "row" not in form:
        assert [x[0] for x in found] == [x[0] for x in reversed(want)]
