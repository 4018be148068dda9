"""extend_attention by decode_attention's kernels on Hopper: a few query tokens of a request a tile.

Decoding knows one query a request. Here each program finds which tile of tokens and which of its keys are its own
(`_tiles.py`); what is split is merged by the launch that merges decode's parts. MLA's rows are all taken so; of fp8
keys and values apart those of few tokens a request: of the fewest they go from memory straight into products, as in
decoding, of more by way of shared memory (`extend_attention_few.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hal.backends.cuda import _merge, decode_attention
from hal.backends.cuda._device import arch
from hal.kv.view import fuse_pages, page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import COUNTERS, MOST, Plan, Scratch, Size, Step, length

MOST_SPLIT = 512
"""Up to so many tokens keys are split: more fill the device, and their parts would take memory."""
MOST_LINES = 1 << 17
"""The same of keys and values apart, by lines of their parts: of few heads more tokens are split."""
ROWS = 64
"""Of a tile."""
FP8_ROWS = 32
"""Of a tile over fp8 rows, under no more than half so many query heads (`_few_heads.py`): two tokens of 16 heads take
15 % less so, and four, which then are two tiles, 1 to 3 % more."""
COLUMNS = 16
"""Of a tile over fp8 keys and values apart: what registers are for, with heads of up to 128 and slots of 32 bits. Else
half of it."""
FEW = 32
"""Rows, a query token and head each, that a request has at most in the mean, to be taken so over fp8: also the columns
of a tile of `extend_attention_few.py`."""
FEW_STAGES = 2
"""Tiles of keys and of values under way there."""
FEW_PER_SM = 4
"""Programs a multiprocessor that keys are split for there: as many as run at once by `FEW_REGISTERS`. Three, of three
tiles under way and more registers, took 3 to 28 % more."""
FEW_REGISTERS = 128
"""Of a thread."""
FEW_KEYS = 1 << 16
"""Listed keys times key heads from which on that is sooner done: a program begins and ends 2 us later than those that
load into lanes."""
FEW_LONG = 256
"""The same of listed keys a request in the mean."""
FEW_WINDOW = 1023
"""No smaller window was measured."""
SAME = (
    "Q_HEADS", "GROUP", "BLOCKS", "K_PAGE", "V_PAGE", "WINDOW", "CAP", "K_KIND", "V_KIND", "LSE", "UNIT", "SHORTEST",
    "BLOCK", "FEW", "PDL", "launch_pdl",
)  # fmt: skip
"""What all of decode_attention's kernels are told alike."""


class Taken(NamedTuple):
    """What a call starts where decode_attention's kernels take it."""

    steps: tuple[Step, ...]
    scratch: Size
    few: int
    """Of no more query tokens than this for each request; 0: of any."""
    beyond: int = 0
    """Of more of these, and"""
    keys: Size | None = None
    """of no fewer listed keys. None: of any that no other way is for."""


def _more(tokens: int) -> Size:
    """1 where there are more query tokens for each request, else 0."""
    return ((length("qo_indptr") + -1).times(tokens) + 1).within(length("q")).at_most(1)


def beside(ways: tuple[Taken, ...], plan: Plan) -> Plan:
    """A plan for calls of more tokens too: `plan` is theirs."""
    more = others = _more(ways[-1].few)
    steps: list[Step] = []
    rest = more
    for way in reversed(ways):
        if way.keys is None:
            due = (others + 1).within(1)
        else:
            many = way.keys.within(length("kv_indices")).at_most(1)
            if way.beyond:
                many = many.times(_more(way.beyond))
            due = (more + 1).within(many)
            others = more + many
            rest = more if len(ways) > 1 else (due + 1).within(1)
        steps = [*_times(way.steps, due), *steps]
    return Plan((*steps, *_times(plan.steps, rest)), ways[-1].scratch.at_least(plan.scratch or 0), plan.returns)


def _times(steps: tuple[Step, ...], due: Size) -> Iterator[Step]:
    return (step._replace(grid=step.grid.times(due)) for step in steps)


def ways(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indices: Tensor, to: str, row: tuple[int, int],
    lse: Tensor | None, causal: bool, window: int, cap: bool, k_scale: object, v_scale: object, shared: bool,
    plain: bool,
) -> tuple[Taken, ...]:  # fmt: skip
    """What a call starts so, of fewer tokens a request first; none where extend_attention's own kernels are for all.
    `window`: -1 for none."""
    if window >= 0 and not causal:
        return ()
    run, blocks, programs, strides = decode_attention._plan(
        q, k_cache, v_cache, row, lse, window >= 0, cap, k_scale, v_scale, shared, plain
    )
    kernels = tuple(_kernels(run, programs, blocks, q, k_cache, v_cache, kv_indices, causal, window, plain))
    if not kernels:
        return ()
    # Of the most tokens a tile, it is enough for all.
    room = _room(*kernels[-1], q.shape[1], v_cache.shape[-1])
    found = tuple(_taken(*each, blocks, strides, room, k_cache, v_cache, to, row, window) for each in kernels)
    if "STAGES" not in kernels[-1][0].static:
        return found
    keys = (length("qo_indptr") + -1).times(FEW_LONG).at_least(max(1, FEW_KEYS // blocks))
    fewest = kernels[0][0].static["TOKENS"] if len(kernels) > 1 else 0
    return (*found[:-1], found[-1]._replace(beyond=fewest, keys=keys))


def _kernels(
    run: launch.Launch, programs: int, blocks: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indices: Tensor,
    causal: bool, window: int, plain: bool,
) -> Iterator[tuple[launch.Launch, int, int]]:  # fmt: skip
    """(what is started, for how many programs keys are split, of how many tokens a request at most; 0: of any)."""
    heads, dim, group = q.shape[1], max(q.shape[2], v_cache.shape[-1]), run.static["GROUP"]
    if "COLUMNS" in run.static:
        columns = COLUMNS if dim <= 128 and kv_indices.dtype == torch.int32 else COLUMNS // 2
        if columns > run.static["COLUMNS"] and dim == 64:
            programs //= 2  # its registers are for half as many a multiprocessor as decode's
        lanes = run.kernel.bind(
            **{**run.static, "COLUMNS": columns, "TOKENS": columns // group, "CAUSAL": causal}
        )  # fmt: skip
        yield lanes, programs, FEW // group
    elif "TOKENS" in run.static:
        rows = FP8_ROWS if k_cache.dtype in FP8 and 2 * heads <= FP8_ROWS else ROWS
        tokens = max(1, rows // heads) if k_cache.shape[-2] == 1 else 1
        from hal.backends.cuda._few_heads import fits

        few_heads = k_cache.dtype in FP8 and fits(group, tokens)
        more = {"FEW_HEADS": few_heads, "PAIRED": not few_heads, "TOKENS": tokens, "CAUSAL": causal}
        yield run.kernel.bind(**{**run.static, **more}), programs, 0
    if plain and not 0 <= window < FEW_WINDOW and for_few(q, k_cache, v_cache, group, run.static["UNIT"]):
        from hal.backends.cuda.extend_attention_few import extend_attention_few_kernel

        few = extend_attention_few_kernel.bind(
            **{name: run.static[name] for name in SAME}, FEW_PARTS=decode_attention.FEW_PARTS, D=q.shape[2],
            DV=v_cache.shape[-1], COLUMNS=FEW, TOKENS=FEW // group, CAUSAL=causal, STAGES=FEW_STAGES, num_warps=4,
            maxnreg=FEW_REGISTERS,
        )  # fmt: skip
        at_once = FEW_PER_SM * decode_attention._sms(q.get_device())
        yield few, max(1, min(at_once, COUNTERS) // blocks), FEW // group


def for_few(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: int, unit: int) -> bool:
    """Whether the kernel of `extend_attention_few.py` takes them: fp8 rows of whole 16 bytes, heads of 64 or 128, up to
    32 query heads of 16 bits a key head."""
    return (
        launch.lane() in ("device", "recorded")
        and arch(q.get_device()) == 90
        and q.dtype.itemsize == 2
        and k_cache.dtype in FP8
        and {q.shape[2], v_cache.shape[-1]} <= {64, 128}
        and group <= FEW
        and unit == 16
        and max(fuse_pages(x)[1][0] for x in (k_cache, v_cache)) < 2**31
    )


def _most(run: launch.Launch, few: int) -> int:
    """Of how many tokens keys are split."""
    lines = run.static["Q_HEADS"] * run.static["TOKENS"]
    return max(MOST_SPLIT, MOST_LINES // lines) if few else MOST_SPLIT


def _room(run: launch.Launch, programs: int, few: int, heads: int, v_dim: int) -> tuple[Size, Size]:
    """Elements of scratch for parts, and for all: their sums, and what is noted behind these (`_tiles.note`)."""
    n, bs, tokens, most = length("q"), length("qo_indptr") + -1, run.static["TOKENS"], _most(run, few)
    lines = n.at_most(n.per(tokens) + bs).at_most(most) + programs
    parts = lines.times(heads * tokens * v_dim)
    return parts, parts + (n.at_most(most) + programs).times(heads * tokens) + n.times(4)


def _taken(
    run: launch.Launch, programs: int, few: int, blocks: int, strides: tuple[int, ...], room: tuple[Size, Size],
    k_cache: Tensor, v_cache: Tensor, to: str, row: tuple[int, int], window: int,
) -> Taken:  # fmt: skip
    n, nnz, bs = length("q"), length("kv_indices"), length("qo_indptr") + -1
    part, sums = Scratch(Size()), Scratch(room[0])
    most = _most(run, few)
    steps = []
    if 0 <= window <= decode_attention.WHOLE - run.static["TOKENS"]:
        most = 0  # no tile sees so many keys that it is worth two launches
    forms = tuple(_by_many(run, programs, k_cache.dtype in FP8, 0, most))
    split = ((each, programs, least, longest) for each, least, longest in forms if longest)
    for each, parts, least, longest in (*split, (forms[-1][0], 1, most, MOST)):
        args = (
            "q", "k_cache", "v_cache", "kv_indptr", "kv_indices", to, "lse", part, sums, "k_scale", "v_scale", *strides,
            length("k_cache", by=page_size(k_cache)), nnz, bs, parts, max(0, window), "scale", "logit_cap",
            "qo_indptr", n, *((0,) if "FEW_HEADS" in each.static else ()),
        )  # fmt: skip
        grid = n.times(blocks) + (parts * blocks if parts > 1 else 0)
        steps.append(Step(each, grid, args, (("q", least, longest),)))
        if parts > 1:  # with one program a kernel notes no parts
            merge = (part, sums, to, "lse", *row, n, programs)
            steps += _merge.steps(each, v_cache.shape[-1], merge, (), least, longest)
    return Taken(tuple(steps), room[1], few)


def _by_many(
    run: launch.Launch, programs: int, fp8: bool, least: int, most: int
) -> Iterator[tuple[launch.Launch, int, int]]:
    """What starts, of more than how many query tokens, and of up to how many: of MLA's rows under more query heads than
    one program takes what leaves parts in fp32, where there are so many that parts are little of the whole. Even
    batches took 1.5 % less so than with halves. Over fp8 registers are too short for pairs to change places."""
    few = max(least, min(2 * programs, most))
    if run.static.get("HALVES") and run.static["GROUP"] > 64:
        yield run, least, few
        yield run.kernel.bind(**{**run.static, "HALVES": False, "PAIRED": not fp8}), few, most
    else:
        yield run, least, most
