"""extend_attention by decode_attention's kernels on Hopper: a few query tokens of a request a tile.

Decoding knows one query a request. Here each program finds which tile of tokens and which of its keys are its own
(`_tiles.py`); what is split is merged by the launch that merges decode's parts. MLA's rows are all taken so; of fp8
keys and values apart, which there go from memory straight into products, those of few tokens a request.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hal.backends.cuda import _merge, decode_attention
from hal.kv.view import page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import MOST, Plan, Scratch, Size, Step, length

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
"""Rows, a query token and head each, that a request has at most in the mean, to be taken so over fp8."""


class Taken(NamedTuple):
    """What a call starts where decode_attention's kernels take it."""

    steps: tuple[Step, ...]
    scratch: Size
    few: int
    """Of no more query tokens than this for each request; 0: of any."""

    def beside(self, plan: Plan) -> Plan:
        """A plan for calls of more tokens too: `plan` is theirs."""
        bs = length("qo_indptr") + -1
        few = length("q").at_least(1).within(bs.times(self.few)).at_most(1)
        more = (bs.times(self.few) + 1).within(length("q")).at_most(1)
        steps = [step._replace(grid=step.grid.times(few)) for step in self.steps]
        steps += [step._replace(grid=step.grid.times(more)) for step in plan.steps]
        return Plan(tuple(steps), self.scratch.at_least(plan.scratch or 0), plan.returns)


def taken(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indices: Tensor, to: str, row: tuple[int, int],
    lse: Tensor | None, causal: bool, window: int, cap: bool, k_scale: object, v_scale: object, shared: bool,
    plain: bool,
) -> Taken | None:  # fmt: skip
    """What a call starts so, or None where extend_attention's own kernels are for it. `window`: -1 for none."""
    if window >= 0 and not causal:
        return None
    run, blocks, programs, strides = decode_attention._plan(
        q, k_cache, v_cache, row, lse, window >= 0, cap, k_scale, v_scale, shared, plain
    )
    if "TOKENS" not in run.static:
        return None
    heads, v_dim, group = q.shape[1], v_cache.shape[-1], run.static["GROUP"]
    more: dict[str, int] = {"CAUSAL": causal}
    if "COLUMNS" in run.static:
        columns = COLUMNS if max(q.shape[2], v_dim) <= 128 and kv_indices.dtype == torch.int32 else COLUMNS // 2
        if columns > run.static["COLUMNS"] and max(q.shape[2], v_dim) == 64:
            programs //= 2  # its registers are for half as many a multiprocessor as decode's
        tokens, few = columns // group, FEW // group
        most = max(MOST_SPLIT, MOST_LINES // (heads * tokens))
        more["COLUMNS"] = columns
    else:
        rows = FP8_ROWS if k_cache.dtype in FP8 and 2 * heads <= FP8_ROWS else ROWS
        tokens = max(1, rows // heads) if k_cache.shape[-2] == 1 else 1
        few, most = 0, MOST_SPLIT
        from hal.backends.cuda._few_heads import fits

        few_heads = k_cache.dtype in FP8 and fits(group, tokens)
        more |= {"FEW_HEADS": few_heads, "PAIRED": not few_heads}
    run = run.kernel.bind(**{**run.static, **more, "TOKENS": tokens})
    n, nnz, bs = length("q"), length("kv_indices"), length("qo_indptr") + -1
    lines = n.at_most(n.per(tokens) + bs).at_most(most) + programs
    part, sums = Scratch(Size()), Scratch(lines.times(heads * tokens * v_dim))  # behind the sums: `_tiles.note`
    steps = []
    if 0 <= window <= decode_attention.WHOLE - tokens:
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
            steps += _merge.steps(each, v_dim, merge, (), least, longest)
    size = lines.times(heads * tokens * v_dim) + (n.at_most(most) + programs).times(heads * tokens) + n.times(4)
    return Taken(tuple(steps), size, few)


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
