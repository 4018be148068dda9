# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""extend_attention by decode_attention's kernel: the query tokens of MLA's rows on Hopper, a few of a request a tile.

Decoding knows one query a request. Here each token is one, or leads a tile: of so many tokens of one request as their
query heads fit its 64 rows, so that keys are read once for all of them. A first kernel leaves four int32 numbers a
token, as bits in fp32 scratch: where its request's keys begin; how many the last of its tile sees, -1 if it leads none;
the tile's tokens, or 0 less how far behind its leader a token is; how many keys the leader sees, each next token one
more. What splits keys (`_split.py`) reads these instead of `kv_indptr`.

Requests that overlap may both write a row; a token leads where its tile's first token is found in another request.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import _merge, decode_attention
from hal.backends.cuda._attention import within
from hal.backends.cuda._device import pdl
from hal.kv.view import page_size
from hal.triton import launch
from hal.triton.plans import MOST, Counters, Plan, Result, Scratch, Size, Step, length

BLOCK = 256
"""Requests that a program looks at together."""
EACH = 16
"""Tokens of a program."""
MOST_SPLIT = 512
"""Up to so many tokens keys are split: more fill the device, and their parts would take memory."""
ROWS = 64
"""Of a tile."""


@triton.jit
def _clamped(indptr, i, mask, size):
    return within(tl.load(indptr + i, mask, other=0), size)


@triton.jit
def _owner(qo_indptr, t, n, bs, BLOCK: tl.constexpr):
    """The first request that has each token, or bs."""
    found = tl.zeros_like(t) + bs
    for b in range(0, bs, BLOCK):
        i = b + tl.arange(0, BLOCK)
        begin = _clamped(qo_indptr, i, i < bs, n)
        stop = _clamped(qo_indptr, i + 1, i < bs, n)
        mine = (t[:, None] >= begin[None, :]) & (t[:, None] < stop[None, :])
        found = tl.minimum(found, tl.min(tl.where(mine, i[None, :], bs), 1))
    return found


@launch.jit(do_not_specialize=("qo_indptr", "kv_indptr", "parts", "tokens", "n", "nnz", "bs"))
def query_tokens_kernel(
    qo_indptr, kv_indptr, parts, tokens, n: tl.int32, nnz: tl.int64, bs: tl.int32, CAUSAL: tl.constexpr,
    TOKENS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0) * EACH + tl.arange(0, EACH)
    owner = _owner(qo_indptr, t, n, bs, BLOCK)
    some = owner < bs
    at = tl.where(some, owner, 0)
    stop = _clamped(qo_indptr, at + 1, some, n)
    behind = (t - _clamped(qo_indptr, at, some, n)) % TOKENS
    if TOKENS > 1:
        behind = tl.where(_owner(qo_indptr, t - behind, n, bs, BLOCK) == owner, behind, 0)
    behind = tl.where(some, behind, 0)
    begin = _clamped(kv_indptr, at, some, nnz)
    keys = tl.maximum(_clamped(kv_indptr, at + 1, some, nnz) - begin, 0)
    rows = tl.minimum(stop - t, TOKENS)
    first = keys
    if CAUSAL:
        first = keys - (stop - t) + 1
        keys = tl.maximum(first + rows - 1, 0)
    leads = some & (behind == 0)
    to = tokens + 4 * t
    there = t < n
    tl.store(to, begin.to(tl.float32, bitcast=True), there)
    tl.store(to + 1, tl.where(leads, keys, -1).to(tl.float32, bitcast=True), there)
    tl.store(to + 2, tl.where(leads, rows, -behind).to(tl.float32, bitcast=True), there)
    tl.store(to + 3, first.to(tl.float32, bitcast=True), there)
    # Of who leads a tile of several parts, they are noted here by who makes the first.
    tl.store(parts + 2 * t, tl.zeros_like(t).to(tl.float32, bitcast=True), there)


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
    tokens = 1
    if "TOKENS" in run.static:
        tokens = max(1, ROWS // heads) if k_cache.shape[-2] == 1 else 1
        run = run.kernel.bind(**{**run.static, "TOKENS": tokens})
    device = q.get_device()
    on = pdl(device)
    find = query_tokens_kernel.bind(
        CAUSAL=causal, TOKENS=tokens, EACH=EACH, BLOCK=BLOCK, PDL=on, launch_pdl=on, num_warps=4
    )
    n, nnz, bs = length("q"), length("kv_indices"), length("qo_indptr") + -1
    split = (n.at_most(MOST_SPLIT) + programs).times(heads * tokens)
    v_dim, behind = v_cache.shape[-1], split.times(v_cache.shape[-1] + 1)
    part, sums = Scratch(Size()), Scratch(split.times(v_dim))
    noted, each = Scratch(behind), Scratch(behind + n.times(2))
    counters = (Counters(),) if run.kernel is decode_attention.decode_attention_kernel else ()
    some, many = ("q", 0, MOST_SPLIT), ("q", MOST_SPLIT, MOST)
    steps = [Step(find, length("q", per=EACH), ("qo_indptr", "kv_indptr", noted, each, n, nnz, bs), (("q", 0, MOST),))]
    for parts, where in ((programs, some), (1, many)):
        args = (
            "q", "k_cache", "v_cache", each, "kv_indices", to, "lse", *counters, part, sums, "k_scale", "v_scale",
            *strides, length("k_cache", by=page_size(k_cache)), nnz, n, parts, 0, "scale", "logit_cap",
        )  # fmt: skip
        steps.append(Step(run, n.times(blocks) + (parts * blocks if parts > 1 else 0), args, (where,)))
    left = (part, sums, to, "lse", *row, n, programs)
    steps += _merge.steps(run, v_dim, left, some, each)
    return Plan(tuple(steps), behind + n.times(6), returns)
