# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Which tile of query tokens and which of its keys a program finds for its own.

Under TRITON_INTERPRET=1, whatever the requests' ranges, gaps and overlaps.
"""

import os
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

import triton.language as tl

from hal.backends.cuda._shares import BEGUN
from hal.backends.cuda._tiles import after, find, find_shares, idle, note, note_none, part_of, share_of
from hal.triton import launch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1"
)
N, NNZ, HEADS = 17, 4000, 3
"""Tokens, entries and query heads of what programs are asked for below."""
ORDERS: list[list[int]] = [
    [0, 4, 4, 9, 11, 17],
    [0, 1, 2, 3, 17],
    [3, 7, 7, 12],
    [5],
    [0, 4, 4, 9, 11, 3, 8, 30],
    [0, 2, 0, 12, 5, 7],
    [2, 13, -4, 6, 2**40],
    [0, 17, 0, 17, 0, 17],
    [20, 3],
]
"""Values of qo_indptr; the last ones fall."""


def ranges(indptr: list[int], n: int) -> list[tuple[int, int]]:
    return list(pairwise(min(max(x, 0), n) for x in indptr))


@launch.jit(do_not_specialize=())
def ask(
    qo, kv, to, part_lse, n: tl.int32, nnz: tl.int64, bs: tl.int32, programs: tl.int32, window: tl.int32,
    SHORTEST: tl.constexpr,
    TOKENS: tl.constexpr, CAUSAL: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    chunk, request, before, falls, every = find(
        qo, kv, each, c, n, nnz, bs, programs, SHORTEST, 0, WHOLE, TOKENS, window, WINDOW
    )
    note_none(qo, part_lse, falls, c, n, bs, programs, LINES)
    to += 12 * c
    tl.store(to, request)
    few = tl.arange(0, BLOCK // 2)
    tl.store(to + 11, idle(qo, few, each, c, n, bs, programs, TOKENS).to(tl.int32))
    tl.store(to + 10, every)
    if request < bs:
        tile, begin, low, high, sees = part_of(
            qo, kv, request, c, before, falls, n, nnz, chunk, TOKENS, CAUSAL, 64, window, WINDOW
        )
        note(part_lse, tl.arange(0, 16), tile, c, falls, n, programs, LINES)
        for i in tl.static_range(5):
            tl.store(to + 1 + i, tile[i])
        tl.store(to + 6, begin)
        tl.store(to + 7, low)
        tl.store(to + 8, high)
        tl.store(to + 9, sees)


def asked(
    order: list[int],
    keys: list[int],
    programs: int,
    tokens: int,
    causal: bool,
    block: int,
    whole: int = 0,
    window: int = -1,
) -> tuple[list[list[int]], torch.Tensor]:
    """(what each program finds: its request and, if there is one, nine numbers, and how many parts there are; notes) of
    `find`, `part_of`, `note`. `whole`: keys that a request may have and not be split; `window`: -1 for none."""
    qo, kv = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (order, keys))
    grid = N + (programs if programs > 1 else 0)
    found = torch.full((grid, 12), -7, dtype=torch.int32, device="cpu")
    lines = HEADS * tokens
    behind = torch.full(((N + programs) * lines + 4 * N + 1,), torch.nan, dtype=torch.float32, device="cpu")
    form = {"SHORTEST": 64, "TOKENS": tokens, "CAUSAL": causal, "LINES": lines, "BLOCK": block, "WHOLE": whole}
    form["WINDOW"] = window >= 0
    ask.bind(**form).start((grid, 1, 1), qo, kv.int(), found, behind, N, NNZ, len(qo) - 1, programs, window)
    noted = behind[(N + programs) * lines :]
    assert bool(behind[: (N + programs) * lines].isnan().all())
    assert bool(noted[-1].isnan())
    return found.tolist(), noted[:-1].view(N, 4)


@pytest.mark.parametrize(
    ("causal", "tokens", "programs", "block", "window"),
    [
        *((True, 1, 11, 32, -1), (True, 4, 11, 4, -1), (True, 3, 11, 32, -1), (False, 4, 11, 32, -1)),
        *((True, 4, 1, 32, -1), (False, 1, 1, 4, -1)),
        *((True, 1, 11, 32, 900), (True, 4, 11, 4, 900), (True, 3, 11, 32, 0), (True, 4, 1, 32, 70)),
        (True, 4, 11, 32, 2**30),
    ],
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_programs_find_every_key_of_every_token(
    order: list[int], causal: bool, tokens: int, programs: int, block: int, window: int
) -> None:
    """Once, in tiles of a request that has them, from the first that one of them sees in a window; that of who leads is
    noted for the launch that merges."""
    bs = len(order) - 1
    kv_indptr = [(700 * i * i) % 4800 - 300 for i in range(bs + 1)]
    found, noted = asked(order, kv_indptr, programs, tokens, causal, block, window=window)
    news, lists = ranges(order, N), ranges(kv_indptr, NNZ)
    falls = any(b < a for a, b in news)
    keys: dict[int, list[tuple[int, int, int]]] = {}
    for c, (request, token, rows, _, part, parts, begin, low, high, sees, all_parts, none) in enumerate(found):
        assert none == (not falls and c >= -(-N // tokens) + bs + programs)
        if request >= bs:
            assert c >= all_parts or falls
            continue
        assert c < all_parts <= len(found)
        first, stop = news[request]
        every = max(lists[request][1] - lists[request][0], 0)
        assert first <= token < token + rows <= min(stop, token + tokens)
        assert begin == lists[request][0]
        assert sees == (every - (stop - token) + 1 if causal else every)
        last = max(sees + rows - 1, 0) if causal else every
        assert 0 <= part < parts
        lowest = max(sees - 1 - window, 0) if window >= 0 else 0
        assert low >= lowest
        assert (low - lowest) % 64 == 0
        assert high <= last
        for t in range(token, token + rows):
            assert request == next(i for i, (a, b) in enumerate(news) if a <= t < b)
            keys.setdefault(t, []).append((c, part, parts))
            if part == parts - 1:
                assert high == last or low >= last
            if part:
                before = next(x for x in found[:c] if (x[0], x[1], x[4]) == (request, token, part - 1))
                assert low == before[7] + (low - lowest) // part
                assert before[8] == min(low, last)
    owned = {t for t in range(N) if any(a <= t < b for a, b in news)}
    assert set(keys) == owned
    for mine in keys.values():
        (parts,) = {parts for _, _, parts in mine}
        assert [part for _, part, _ in mine] == list(range(parts))
        assert parts == 1 or not falls
    if programs == 1:
        assert bool(noted.isnan().all())
        assert all(len(mine) == 1 for mine in keys.values())
        return
    if window == 900 and not falls:
        assert max(parts for _, _, _, _, _, parts, *_ in found) <= max(1, -(-(900 + tokens) // 64))
    if len(owned) > 4 and not falls and not 0 <= window < 64:
        assert any(len(mine) > 1 for mine in keys.values())
    for t in range(N):
        parts, line, apart, behind = noted[t].view(torch.int32).tolist()
        if falls or t not in owned:
            assert parts == 0
            continue
        assert parts == len(keys[t])
        assert [line + i * apart for i in range(parts)] == [c for c, _, _ in keys[t]]
        assert found[line][1] + behind == t


@launch.jit(do_not_specialize=())
def ask_shares(
    qo, kv, to, part_lse, n: tl.int32, nnz: tl.int64, bs: tl.int32, programs: tl.int32, TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, SLACK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """All that a program has, by nine numbers a tile of tokens."""
    c = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    chunk, share, request, tile, unit, before, falls = find_shares(
        qo, kv, tl.arange(0, BLOCK // 2), each, c, n, nnz, bs, programs, 64, 0, TOKENS, 64, SLACK
    )
    note_none(qo, part_lse, falls, c, n, bs, programs, LINES)
    to += 9 * MOST * c
    while request < bs:
        following = bs
        if share > 0:
            found, _, low, high, sees, next_before, tiles = share_of(
                qo, kv, request, tile, c, before, share, n, nnz, TOKENS, CAUSAL, 64
            )
            if next_before + BEGUN < (c + 1) * share:
                following, tile = after(qo, request, tile, tiles, n, bs, TOKENS)
            before = next_before
        else:
            found, _, low, high, sees = part_of(qo, kv, request, c, before, falls, n, nnz, chunk, TOKENS, CAUSAL, 64)
        note(part_lse, tl.arange(0, 16), found, c + unit, falls, n, programs, LINES)
        tl.store(to, request)
        tl.store(to + 1, found[0])
        tl.store(to + 2, found[1])
        tl.store(to + 3, found[4])
        tl.store(to + 4, low)
        tl.store(to + 5, high)
        tl.store(to + 6, sees)
        tl.store(to + 7, c + unit)
        tl.store(to + 8, share)
        to += 9
        unit += 1
        request = following


MOST = 32
"""Tiles of a program that are written down."""


@pytest.mark.parametrize(
    ("causal", "tokens", "programs", "block"), [(True, 1, 5, 32), (True, 2, 5, 8), (False, 4, 3, 32)]
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_shares_have_every_key_of_every_token(
    order: list[int], causal: bool, tokens: int, programs: int, block: int
) -> None:
    """Once, in parts whose lines follow each other and are nobody else's, as is noted for the launch that merges."""
    bs = len(order) - 1
    kv_indptr = [0]
    for i in range(bs):
        kv_indptr.append(kv_indptr[-1] + (0 if i == 3 else 250 + 100 * i))
    assert kv_indptr[-1] <= NNZ
    qo, kv = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (order, kv_indptr))
    found = torch.full((N + programs, MOST, 9), -7, dtype=torch.int32, device="cpu")
    lines = HEADS * tokens
    behind = torch.full(((N + programs) * lines + 4 * N + 1,), torch.nan, dtype=torch.float32, device="cpu")
    form = {"TOKENS": tokens, "CAUSAL": causal, "LINES": lines, "BLOCK": block, "SLACK": 1, "MOST": MOST}
    ask_shares.bind(**form).start((N + programs, 1, 1), qo, kv.int(), found, behind, N, NNZ, bs, programs)
    noted = behind[(N + programs) * lines : -1].view(N, 4)
    news = ranges(order, N)
    falls = any(b < a for a, b in news)
    rows = [(c, *row) for c, some in enumerate(found.tolist()) for row in some if row[0] >= 0]
    if not falls and tokens < 4 and len({t for a, b in news for t in range(a, b)}) > 8:
        assert {row[9] > 0 for row in rows} == {True}
        assert max(row[0] for row in rows) < programs
    assert falls or len({row[8] for row in rows}) == len(rows)
    keys: dict[int, list[tuple[int, ...]]] = {}
    for _, request, token, many, parts, low, high, sees, line, share in rows:
        first, stop = news[request]
        every = kv_indptr[request + 1] - kv_indptr[request]
        assert first <= token < token + many <= min(stop, token + tokens)
        assert sees == (every - (stop - token) + 1 if causal else every)
        for t in range(token, token + many):
            last = max(sees + many - 1, 0) if causal else every
            keys.setdefault(t, []).append((line, low, high, last, parts, token, share))
    assert set(keys) == {t for t in range(N) if any(a <= t < b for a, b in news)}
    for t, mine in keys.items():
        parts, token, share = mine[0][4:]
        assert len(mine) == parts
        assert (mine[0][1], mine[-1][2]) == (0, mine[0][3])
        assert all(x[2] == min(y[1], x[3]) for x, y in pairwise(mine))
        if falls or programs == 1:
            continue
        assert not share or [x[0] for x in mine] == list(range(mine[0][0], mine[0][0] + parts))
        noted_parts, line, apart, place = noted[t].view(torch.int32).tolist()
        assert noted_parts == parts
        assert [line + i * apart for i in range(parts)] == [x[0] for x in mine]
        assert token + place == t


@pytest.mark.parametrize("block", [4, 32])
def test_nothing_is_split_of_requests_without_many_keys(block: int) -> None:
    order, tiles = ORDERS[0], 2 + 0 + 2 + 1 + 2
    keys = [0, 100, 900, 1000, 2000, 2300]
    may, _ = asked(order, keys, 11, 3, True, block, 999)
    assert may == asked(order, keys, 11, 3, True, block)[0]
    assert max(row[5] for row in may if row[0] < len(order) - 1) > 1
    found, noted = asked(order, keys, 11, 3, True, block, 1000)
    assert [row[5] for row in found[:tiles]] == [1] * tiles
    assert {row[10] for row in found} == {tiles}
    assert noted[:, 0].view(torch.int32).tolist() == [1] * N
