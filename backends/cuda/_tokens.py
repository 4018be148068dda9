"""extend_attention by decode_attention's kernel: the query tokens of MLA's rows on Hopper, a few of a request a tile.

Decoding knows one query a request. Here each program finds which tile of tokens and which of its keys are its own
(`_tiles.py`); what is split is merged by the launch that merges decode's parts.
"""

from torch import Tensor

from hal.backends.cuda import _merge, decode_attention
from hal.kv.view import page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import MOST, Plan, Result, Scratch, Size, Step, length

MOST_SPLIT = 512
"""Up to so many tokens keys are split: more fill the device, and their parts would take memory."""
ROWS = 64
"""Of a tile."""
FP8_ROWS = 32
"""Of a tile over fp8 rows, under no more than half so many query heads (`_few_heads.py`): two tokens of 16 heads take
15 % less so, and four, which then are two tiles, 1 to 3 % more."""


def taken(run: launch.Launch) -> bool:
    """Whether queries go as tokens where decode_attention would start this."""
    return run.kernel.name == "decode_attention_hopper_kernel"


def plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, returns: str | Result, to: str, row: tuple[int, int],
    lse: Tensor | None, causal: bool, window: bool, cap: bool, k_scale: object, v_scale: object, plain: bool,
) -> Plan | None:  # fmt: skip
    """What a call over shared rows starts, or None where extend_attention's own kernels are for it."""
    if window:
        return None
    run, blocks, programs, strides = decode_attention._plan(
        q, k_cache, v_cache, row, lse, False, cap, k_scale, v_scale, True, plain
    )
    if not taken(run):
        return None
    heads = q.shape[1]
    rows = FP8_ROWS if k_cache.dtype in FP8 and 2 * heads <= FP8_ROWS else ROWS
    tokens = max(1, rows // heads) if k_cache.shape[-2] == 1 else 1
    run = run.kernel.bind(**{**run.static, "TOKENS": tokens, "CAUSAL": causal})
    n, nnz, bs = length("q"), length("kv_indices"), length("qo_indptr") + -1
    lines = (n.at_most(MOST_SPLIT) + programs).times(heads * tokens)
    v_dim = v_cache.shape[-1]
    part, sums = Scratch(Size()), Scratch(lines.times(v_dim))  # behind the sums: `_tiles.note`
    some, many = ("q", 0, MOST_SPLIT), ("q", MOST_SPLIT, MOST)
    steps = []
    for parts, where in ((programs, some), (1, many)):
        args = (
            "q", "k_cache", "v_cache", "kv_indptr", "kv_indices", to, "lse", part, sums, "k_scale", "v_scale", *strides,
            length("k_cache", by=page_size(k_cache)), nnz, bs, parts, 0, "scale", "logit_cap", "qo_indptr", n,
        )  # fmt: skip
        steps.append(Step(run, n.times(blocks) + (parts * blocks if parts > 1 else 0), args, (where,)))
    steps += _merge.steps(run, v_dim, (part, sums, to, "lse", *row, n, programs), (some,), MOST_SPLIT)
    return Plan(tuple(steps), lines.times(v_dim + 1) + n.times(4), returns)
