# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
"""Which tile, or part of one, an item of extend_attention's kernel for Hopper is.

Under TRITON_INTERPRET=1, which knows no Gluon: what looks for an item has layouts of its ranges alone, and is run as
Triton.
"""

import os
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from hal.backends.cuda import _turns

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter: TRITON_INTERPRET=1"
)
Q_HEADS, GROUP, ROWS, N = 6, 3, 16, 16
BLOCKS = Q_HEADS // GROUP
BATCHES = {
    "one": [(11, 70)],
    "some": [(2, 40), (0, 9), (7, 7), (4, 300), (9, 20), (1, 0)],
    "many": [((5 * i + 2) % 11, 3 * i) for i in range(20)],
    "none": [(0, 5)] * 3,
    "long first": [(9, 5000), *[(3, 100)] * 9],
    "long last": [*[(3, 100)] * 9, (9, 5000)],
    "longs": [(1, 40), (6, 3000), (0, 900), (5, 40)] * 3,
    "too many": [(1, 20000), *[(1, 1500)] * 6, *[(1, 10)] * 40],
}
"""New tokens and keys of each request. Of too many there would be more parts than lines, for two programs."""
SPLIT = ("some", "long first", "long last", "longs")


@triton.jit
def ask(
    qo, kv, to, n, nnz, bs, programs, window, Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    FEW: tl.constexpr, ROW: tl.constexpr, LONG_FIRST: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    batch = (qo, kv, tl.cast(n, tl.int64), tl.cast(nnz, tl.int64), bs)
    found = _turns.survey(batch, programs, GROUP, ROWS, BLOCK, FEW, LONG_FIRST)
    items, tile, lowest, low, high, begin, kv_head, part = _turns.find(
        item, batch, found, window, Q_HEADS, GROUP, BLOCKS, GROUP, ROWS, N, CAUSAL, WINDOW, BLOCK, FEW, ROW,
        LONG_FIRST,
    )  # fmt: skip
    to += 11 * item
    tl.store(to, items)
    for i in tl.static_range(4):
        tl.store(to + 1 + i, tile[i])
    tl.store(to + 5, lowest)
    tl.store(to + 6, low)
    tl.store(to + 7, high)
    tl.store(to + 8, begin)
    tl.store(to + 9, kv_head)
    tl.store(to + 10, part)


class Language:
    """Triton's, where Gluon's has no range without a layout."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(start: int, end: int, _layout: object) -> tl.tensor:
        return tl.arange(start, end)


@pytest.fixture(autouse=True)
def as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in vars(_turns).items():
        if (gluon := getattr(value, "fn", None)) is not None and callable(gluon):
            # A copy, as of a function that another module has too the interpreter changes what it knows.
            copy = type(gluon)(gluon.__code__, vars(_turns), name, gluon.__defaults__)
            copy.__annotations__ = gluon.__annotations__
            monkeypatch.setattr(_turns, name, triton.jit(copy))
    monkeypatch.setattr(_turns, "tl", tl, raising=False)  # what the interpreter looks for
    monkeypatch.setattr(_turns, "gl", Language())
    monkeypatch.setattr(_turns, "_each", lambda _: None)
    monkeypatch.setattr(_turns, "_uniform", lambda x: x)


def asked(
    batch: list[tuple[int, int]], long_first: bool, *, causal: bool = True, window: int = -1, block: int = 32,
    few: int = 16, row: int = 64, programs: int = 7,
) -> list[list[int]]:  # fmt: skip
    """Of all items: a tile's four numbers, the position of its first token, entries from and to, where its request's
    begin, key head, part."""
    news, keys = ([x[i] for x in batch] for i in range(2))
    qo, kv = (torch.tensor([0, *accumulate(x)], dtype=torch.int32, device="cpu") for x in (news, keys))

    def of_items(many: int) -> list[list[int]]:
        found = torch.full((many, 11), -7, dtype=torch.int64, device="cpu")
        ask[(many,)](
            qo, kv, found, sum(news), sum(keys), len(batch), programs, window, Q_HEADS, GROUP, BLOCKS, ROWS, N,
            causal, window >= 0, block, few, row, long_first,
        )  # fmt: skip
        return found.tolist()  # type: ignore[no-any-return]

    items = of_items(1)[0][0]
    found = of_items(items) if items else []
    assert all(x[0] == items for x in found)
    return [x[1:] for x in found]


def tiles_of(batch: list[tuple[int, int]], causal: bool = True, window: int = -1, **_: object) -> list[list[int]]:
    """All of them, in order, as `asked` has them."""
    tiles = []
    token, begin = 0, 0
    for new, keys in batch:
        for row in range(0, new * GROUP, ROWS):
            rows = min(ROWS, new * GROUP - row)
            t, ahead = divmod(row, GROUP)
            lowest = keys - new + t
            last = keys - new + (row + rows - 1) // GROUP
            low = max(lowest - window, 0) if window >= 0 else 0
            high = min(keys, max(last + 1, 0)) if causal else keys
            for head in range(BLOCKS):
                tiles.append([token + t, rows, head * GROUP, ahead, lowest, low, high, begin, head, -1])
        token, begin = token + new, begin + keys
    return tiles


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"few": 4},
        {"few": 4, "block": 16},
        {"few": 4, "block": 4},
        {"row": 2**22},
        {"causal": False},
        {"window": 5},
        {"window": 40, "few": 4, "block": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", ["one", "some", "many", "none"])
def test_items_are_all_tiles(batch: str, form: dict[str, Any]) -> None:
    """Of each block of heads, once, with the keys that some token sees; the last come first, unless the keys of all
    heads are more than the L2 holds."""
    requests = BATCHES[batch]
    want = tiles_of(requests, **form)
    found = asked(requests, False, **form)
    assert sorted(found) == want
    if "row" not in form:
        assert [x[0] for x in found] == [x[0] for x in reversed(want)]


@pytest.mark.parametrize(("batch", "form"), [
    *((batch, {}) for batch in ("one", "some", "none", "long first", "longs")),
    *((batch, {"few": 4}) for batch in ("many", "long last")),
    *((batch, {"few": 4, "block": 8}) for batch in ("longs", "long first")),
    ("too many", {"programs": 2}),
    ("long first", {"causal": False}),
    *((batch, {"row": 2**22}) for batch in ("some", "long last")),
], ids=str)  # fmt: skip
def test_tiles_of_long_requests_come_first_and_in_parts(batch: str, form: dict[str, Any]) -> None:
    """Which are all of a tile's keys, on lines that are no other's."""
    requests = BATCHES[batch]
    found = asked(requests, True, **form)
    starts = [0, *accumulate(new for new, _ in requests)]
    mean = sum(keys for _, keys in requests) / len(requests)
    long = [requests[bisect_right(starts, x[0]) - 1][1] > 2 * mean for x in found]
    if "row" not in form:  # else so for each of some heads at a time
        assert long == sorted(long, reverse=True)
    parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for (*tile, lowest, low, high, begin, head, part), first in zip(found, long, strict=True):
        line, nth, many = (part % 1024, part // 1024 % 1024, part // 1024**2) if part >= 0 else (-1, 0, 1)
        assert first or many == 1
        parts.setdefault((*tile, lowest, begin, head), []).append((nth, many, line, low, high))
    whole = []
    for (*tile, lowest, begin, head), those in parts.items():
        those.sort()
        assert [x[:2] for x in those] == [(i, len(those)) for i in range(len(those))]
        assert [x[2] for x in those] == [those[0][2] + i for i in range(len(those))] or len(those) == 1
        keys = [x for *_, low, high in those for x in range(low, high)]
        assert keys == list(range(len(keys)))
        whole.append([*tile, lowest, 0, len(keys), begin, head, -1])
    assert sorted(whole) == tiles_of(requests, **form)
    lines = [(line, key[-1]) for key, those in parts.items() for _, many, line, *_ in those if many > 1]
    assert len(lines) == len(set(lines)) <= 3 * form.get("programs", 7) * BLOCKS
    assert {line for line, _ in lines} == set(range(len(lines) // BLOCKS))
    assert bool(lines) == (batch in SPLIT)


def test_of_very_many_requests_none_is_split() -> None:
    requests = BATCHES["longs"]
    assert sorted(asked(requests, True, few=4, block=4)) == tiles_of(requests)
