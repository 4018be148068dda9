# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""extend_attention on Hopper, in Gluon: four warps fetch keys and values, and two times four multiply.

In Triton's own pipeline eight warps do everything in turn. Here the rows of a paged cache are fetched by warps that do
nothing else, into rings of tiles in shared memory, and the two groups of 64 rows drift apart, so that exponentials of
one run under products of the other. Within a group, the next tile's logits are asked for before this tile's product
with v. What a tile's rows are is as in `extend_attention_kernel`; which tiles a program does, one after the other:
`_turns.py`. How rows of 16 bits and of fp8 are fetched: `_fetch.py`; what is done with what was found: `_leave.py`.

Source: Shah et al., FlashAttention-3 (arXiv:2407.08608).
"""

import dataclasses

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import _attention
from hal.backends.cuda._attention import LOG2E
from hal.backends.cuda._cap import tanh
from hal.backends.cuda._fetch import ROWS, behind, fetch, scaled
from hal.backends.cuda._leave import ABSENT, SHIFT, leave, leave_part, merge_last
from hal.backends.cuda._told import TOLD, counter_of, line_of, tile_of, told
from hal.backends.cuda._turns import unpacked
from hal.triton import launch

factor = gluon.jit(_attention.factor.fn)
positive = gluon.jit(_attention.positive.fn)
without = gluon.jit(_attention.without.fn)


@gluon.jit
def _by_row(x, DIFFER: gl.constexpr):
    """What is one number for all rows, or one for each."""
    if DIFFER:
        x = x[:, None]
    return x


@gluon.jit
def _sums(p):
    """Of each row, those of the four threads that share it."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _edge(there, j, inner, full, WINDOW: gl.constexpr):
    """Whether some row does not see some key of a tile."""
    N: gl.constexpr = there.shape[0]
    EACH: gl.constexpr = gl.BlockedLayout([N // 32], [32], [gl.num_warps()], [0])
    edge = (j + N > full) | (gl.min(there.load(EACH), 0) == 0)
    if WINDOW:
        edge = edge | (j < inner)
    return edge


@gluon.jit
def _softmax(
    s, top, total, there, edge, j, high, position, window, unit, within_cap, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """One step of the running softmax, over a tile of products; `there` says which of its keys are. `unit` is what
    makes of them logits in units of log 2; under a cap `within_cap` what makes of them such whose tanh is asked for,
    and `unit` that for these."""
    N: gl.constexpr = s.shape[1]
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    if CAP:
        s = tanh(s * _by_row(within_cap, FP8))
    if edge:
        # Of a key's place in the tile, what is one number for all threads stands alone: else a register for each key.
        key = gl.arange(0, N, KEYS)
        block = (key // 8 * 8)[None, :]
        rest = (j + key % 8)[None, :]
        seen = (there.load(KEYS) != 0)[None, :]
        if CAUSAL:
            seen = seen & (block <= gl.minimum(position, high - 1)[:, None] - rest)
        else:
            seen = seen & (block < high - rest)
        if WINDOW:
            seen = seen & (block >= (position - window)[:, None] - rest)
        s = gl.where(seen, s, ABSENT)
    # Rounded once: as a fused top * unit - base, where top stays, is not 0, sums would shrink with each tile.
    new = gl.maximum(top, gl.max(s, 1) * unit)
    base = gl.where(new == ABSENT, 0.0, new)
    shifted = base
    if FP8:
        shifted = base - SHIFT
    p = gl.exp2(s * _by_row(unit, FP8 and not CAP) - shifted[:, None])
    keep = gl.exp2(top - base)
    sums = _sums(p)
    total = total * gl.convert_layout(keep, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, keep, new, total


@gluon.constexpr_function
def _registers(D, WINDOW, CAP, FP8):
    """Of a thread that multiplies; as much of 504 as is left goes to each that fetches. Found by looking for spills."""
    if D == 256:
        return 216 if FP8 and WINDOW else 208 if FP8 else 224 if CAP else 216
    return 192 if FP8 else 208


@gluon.constexpr_function
def _threads(D):
    """How many of a group give a tile back: each for itself, as one for all would wait for all. Heads of 64 took 4 %
    more by it, and of 256 no less."""
    return 128 if D == 128 else 1


@gluon.constexpr_function
def _own(D, DIM):
    """Whether shared memory has room for outputs beside the queries: then the next tile's come while they leave."""
    return max(D, DIM) <= 128


@gluon.constexpr_function
def _places(D, FP8):
    """Tiles of queries that there is room for: with two the next tile's are there when it begins. Those of fp8 are made
    by who multiplies."""
    return 2 if D == 64 and not FP8 else 1


@gluon.jit
def _free(empty, THREADS: gl.constexpr):
    """A tile of keys or values is given back, by so many threads of a group."""
    if THREADS > 1:
        async_copy.mbarrier_arrive(empty, increment_count=False)
    else:
        mbarrier.arrive(empty)


@gluon.jit
def _pass_by(low, high, stage, phase, barriers, STAGES: gl.constexpr, N: gl.constexpr, THREADS: gl.constexpr):
    """Gives the tiles of entries [low, high) back, by a group that has no rows of theirs; how far the rings are then.
    Not before they are there, so that none is given back twice."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    for _ in range(low, high, N):
        mbarrier.wait(k_full.index(stage), phase)
        _free(k_empty.index(stage), THREADS)
        mbarrier.wait(v_full.index(stage), phase)
        _free(v_empty.index(stage), THREADS)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def _zero(x):
    """0, which the compiler can't know: what is made of it isn't kept over a loop, for which registers are short."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _logits(part, stage, q_tiles, k_ring, none, REST: gl.constexpr):
    """Queries times keys, begun."""
    k = k_ring[0].index(stage).permute((1, 0))
    s = warpgroup_mma(q_tiles[0].index(part), k, none, use_acc=False, is_async=True)
    if REST:
        k = k_ring[1].index(stage).permute((1, 0))
        s = warpgroup_mma(q_tiles[1].index(part), k, s, is_async=True)
    return s


@gluon.jit
def _multiply(
    PART: gl.constexpr, q, out, lse, part, part_lse, counters, turns, q_tiles, out_tiles, k_ring, v_ring, there,
    barriers, q_row, q_head, out_row, out_head, window, by, sign, cap, v_factor, Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr, BLOCKS: gl.constexpr, HEADS: gl.constexpr, LINES: gl.constexpr, REST: gl.constexpr,
    DIM: gl.constexpr, WIDTH: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    LSE: gl.constexpr, UNIT: gl.constexpr, FP8: gl.constexpr, MAP: gl.constexpr, SPLIT: gl.constexpr,
    LONG_FIRST: gl.constexpr,
):  # fmt: skip
    """Rows [64 PART, 64 PART + 64) of tiles, as they are told."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    D: gl.constexpr = v_ring.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    THREADS: gl.constexpr = _threads(D)
    OWN: gl.constexpr = _own(D, DIM)
    PLACES: gl.constexpr = _places(D, FP8)
    # Values were asked for before the next keys, by the same threads: where no copy engine brings them, who has those
    # keys has these values. Heads of 64 and 256 took more time without the wait, 4 and 1 %.
    WAIT: gl.constexpr = MAP or D != 128
    dtype: gl.constexpr = v_ring.dtype
    stage = 0
    phase = 0
    done = 0
    rows, lowest, low, high = told(turns, done)
    while rows > 0:
        zero = _zero(done)
        begin = PART * ROWS + zero
        place = done % PLACES
        mine = 2 * place + PART
        r = begin + gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
        ahead = tile_of(turns, done)[3]
        position = lowest + behind(r, ahead, HEADS) // HEADS
        # All rows see all of [inner, full).
        full = high
        if CAUSAL:
            full = gl.minimum(full, gl.maximum(lowest + behind(PART * ROWS, ahead, HEADS) // HEADS + 1, 0))
        inner = 0
        if WINDOW:
            inner = lowest + behind(PART * ROWS + ROWS - 1, ahead, HEADS) // HEADS - window
        top = gl.full([ROWS], ABSENT, gl.float32, gl.SliceLayout(1, LOGITS))
        acc = gl.zeros([ROWS, D], gl.float32, SUMS)
        none = gl.zeros([ROWS, N], gl.float32, LOGITS)
        total = _sums(none)
        unit = by
        within_cap = by
        if FP8:
            e = scaled(
                q, q_tiles[0].index(PART + zero), begin, tile_of(turns, done), q_row, q_head, sign, DIM, UNIT, HEADS
            )
            fence_async_shared()
            unit = positive(without(by, gl.convert_layout(e, gl.SliceLayout(1, LOGITS))))
            if not CAP:
                unit = unit * LOG2E
        else:
            mbarrier.wait(q_full.index(place), done // PLACES & 1)
        if CAP:
            within_cap = unit / cap
            unit = cap * LOG2E
        some = high > low
        if PART == 1:
            some = some & (rows > ROWS)  # of a few tokens it has none, and what it multiplied would take as long
        if some:
            # `wgmma` sees what was written only past a fence: the writers' (fp8), or one here, as copies end by
            # themselves.
            mbarrier.wait(k_full.index(stage), phase)
            if not FP8:
                fence_async_shared()
            s = warpgroup_mma_wait(0, [_logits(mine, stage, q_tiles, k_ring, none, REST)])
            edge = _edge(there.index(stage), low, inner, full, WINDOW)
            p, keep, top, total = _softmax(
                s, top, total, there.index(stage), edge, low, high, position, window, unit, within_cap, CAUSAL,
                WINDOW, CAP, FP8,
            )  # fmt: skip
            _free(k_empty.index(stage), THREADS)
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
            for j in range(low + N, high, N):
                before = stage
                before_phase = phase
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
                mbarrier.wait(k_full.index(stage), phase)
                if not FP8:
                    fence_async_shared()
                # Asked here, it is known when the products are.
                edge = _edge(there.index(stage), j, inner, full, WINDOW)
                s_begun = _logits(mine, stage, q_tiles, k_ring, none, REST)
                if WAIT:
                    mbarrier.wait(v_full.index(before), before_phase)
                    if not FP8:
                        fence_async_shared()
                acc_begun = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
                s = warpgroup_mma_wait(1, [s_begun])
                p, keep, top, total = _softmax(
                    s, top, total, there.index(stage), edge, j, high, position, window, unit, within_cap, CAUSAL,
                    WINDOW, CAP, FP8,
                )  # fmt: skip
                _free(k_empty.index(stage), THREADS)
                acc = warpgroup_mma_wait(0, [acc_begun])
                _free(v_empty.index(before), THREADS)
                acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, SUMS))[:, None]
                weights = gl.convert_layout(p.to(dtype), WEIGHTS)
            if OWN and not FP8:
                gl.thread_barrier()
                mbarrier.arrive(q_empty.index(place))
            mbarrier.wait(v_full.index(stage), phase)
            if not FP8:
                fence_async_shared()
            acc = warpgroup_mma(weights, v_ring.index(stage), acc)
            _free(v_empty.index(stage), THREADS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        else:
            if PART == 1:
                stage, phase = _pass_by(low, high, stage, phase, barriers, STAGES, N, THREADS)
            if OWN and not FP8:
                mbarrier.arrive(q_empty.index(place))

        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LOGITS))
        found = (acc, top, total)
        where = (turns, done, begin, q_empty.index(place))
        if SPLIT or LONG_FIRST:
            line = line_of(turns, done)
            if line < 0:
                leave(
                    found, where, out, lse, out_tiles.index(PART + zero), v_factor, r, out_row, out_head, Q_HEADS,
                    HEADS, WIDTH, LSE, UNIT, FP8, OWN,
                )  # fmt: skip
            else:
                if LONG_FIRST:
                    tile = tile_of(turns, done)  # before it is forgotten
                    line, nth, parts = unpacked(line)
                leave_part(found, where, part, part_lse, line, v_factor, r, Q_HEADS, HEADS, LINES, WIDTH, FP8, OWN)
                if LONG_FIRST:
                    counter = counter_of(counters, line - nth, tile, PART, Q_HEADS, GROUP, BLOCKS, HEADS)
                    merge_last(
                        tile, begin, line - nth, parts, counter, out, lse, part, part_lse, out_row, out_head, Q_HEADS,
                        HEADS, LINES, WIDTH, LSE, UNIT,
                    )  # fmt: skip
        else:
            leave(
                found, where, out, lse, out_tiles.index(PART + zero), v_factor, r, out_row, out_head, Q_HEADS, HEADS,
                WIDTH, LSE, UNIT, FP8, OWN,
            )  # fmt: skip
        done += 1
        rows, lowest, low, high = told(turns, done)


@gluon.jit
def _barriers(MANY: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [MANY, 1], mbarrier.MBarrierLayout())


KEYS_MAP = launch.Map(
    "k_map", of="k_cache", rows="num_slots", stride="kc_page", unit="UNIT", columns=0, box=(128, 64), when="MAP"
)
"""Of all heads' keys."""
VALUES_MAP = dataclasses.replace(KEYS_MAP, name="v_map", of="v_cache", stride="vc_page")


@launch.jit(
    gluon=True,
    maps=(KEYS_MAP, VALUES_MAP),
    do_not_specialize=(
        "qo_indptr", "kv_indptr", "kv_indices", "lse", "counters", "k_scale", "v_scale", "q_row", "q_head", "kc_page",
        "kc_token", "kc_head", "vc_page", "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "n", "bs",
        "window", "scale", "cap", "part_lse", "programs",
    ),
)  # fmt: skip
def extend_attention_hopper_kernel(
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse, counters, k_scale, v_scale,
    q_row: gl.int64, q_head: gl.int64, kc_page: gl.int64, kc_token: gl.int64, kc_head: gl.int64,
    vc_page: gl.int64, vc_token: gl.int64, vc_head: gl.int64, out_row: gl.int64, out_head: gl.int64,
    num_slots: gl.int64, nnz: gl.int64, n: gl.int64, bs: gl.int32, window: gl.int32, scale, cap,
    part, part_lse, programs: gl.int32, k_map, v_map, Q_HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    FIRST: gl.constexpr, REST: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, K_PAGE: gl.constexpr,
    V_PAGE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr,
    UNIT: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr, PDL: gl.constexpr,
    K_KIND: gl.constexpr, V_KIND: gl.constexpr, MAP: gl.constexpr, SPLIT: gl.constexpr, LONG_FIRST: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    FP8: gl.constexpr = k_cache.dtype.element_ty != q.dtype.element_ty
    by = scale * factor(k_scale, K_KIND)
    v_factor = factor(v_scale, V_KIND)
    sign = 1.0
    if FP8:
        # The greatest product is the greatest logit only by a factor above 0.
        sign = gl.where(by < 0, -1.0, 1.0)
        by = gl.abs(by)
    else:
        by = positive(by)
        if not CAP:
            by *= LOG2E

    REGISTERS: gl.constexpr = _registers(D, WINDOW, CAP, FP8)
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    PLACES: gl.constexpr = _places(D, FP8)
    q_tiles = (gl.allocate_shared_memory(dtype, [2 * PLACES, ROWS, FIRST], TILE),)
    k_ring = (gl.allocate_shared_memory(dtype, [STAGES, N, FIRST], TILE),)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, N, D], TILE)
    if REST:
        LAST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], dtype)
        q_tiles = (q_tiles[0], gl.allocate_shared_memory(dtype, [2 * PLACES, ROWS, REST], LAST))
        k_ring = (k_ring[0], gl.allocate_shared_memory(dtype, [STAGES, N, REST], LAST))
    out_tiles = q_tiles[0]
    if _own(D, DIM):
        out_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D], TILE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rows = gl.allocate_shared_memory(gl.int64, [2 * ROWS], FLAT)
    k_rows = gl.allocate_shared_memory(gl.int64, [STAGES, N], FLAT)
    v_rows = k_rows
    if V_PAGE:
        v_rows = gl.allocate_shared_memory(gl.int64, [STAGES, N], FLAT)
    there = gl.allocate_shared_memory(gl.int32, [STAGES, N], FLAT)
    told_full, told_empty = _barriers(2), _barriers(2)
    turns = (gl.allocate_shared_memory(gl.int32, [2, TOLD], FLAT), told_full, told_empty)
    q_full, q_empty = _barriers(PLACES), _barriers(PLACES)
    k_full, k_empty, v_full, v_empty = _barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    for i in gl.static_range(PLACES):
        mbarrier.init(q_full.index(i), count=128)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(told_full.index(i), count=1)
        mbarrier.init(told_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1 if FP8 else 129)
        mbarrier.init(v_full.index(i), count=1 if FP8 else 128 + MAP)
        mbarrier.init(k_empty.index(i), count=2 * _threads(D))
        mbarrier.init(v_empty.index(i), count=2 * _threads(D))
    gl.warp_specialize(
        [
            (fetch, (
                q, k_cache, v_cache, kv_indices, (qo_indptr, kv_indptr, n, nnz, bs), (part_lse, programs),
                counters, window, turns, q_tiles, k_ring, v_ring, (q_rows, k_rows, v_rows, there), barriers,
                (q_row, q_head, kc_page, kc_token, vc_page, vc_token), kc_head, vc_head, num_slots, k_map, v_map,
                Q_HEADS, GROUP, BLOCKS, HEADS, TOKENS, CAUSAL, WINDOW, BLOCK, FEW, K_PAGE, V_PAGE, DIM, WIDTH, UNIT,
                MAP, SPLIT, LONG_FIRST,
            )),
            (_multiply, (
                0, q, out, lse, part, part_lse, counters, turns, q_tiles, out_tiles, k_ring, v_ring, there, barriers,
                q_row, q_head, out_row, out_head, window, by, sign, cap, v_factor, Q_HEADS, GROUP, BLOCKS, HEADS,
                Q_HEADS * TOKENS, REST, DIM, WIDTH, CAUSAL, WINDOW, CAP, LSE, UNIT, FP8, MAP, SPLIT, LONG_FIRST,
            )),
            (_multiply, (
                1, q, out, lse, part, part_lse, counters, turns, q_tiles, out_tiles, k_ring, v_ring, there, barriers,
                q_row, q_head, out_row, out_head, window, by, sign, cap, v_factor, Q_HEADS, GROUP, BLOCKS, HEADS,
                Q_HEADS * TOKENS, REST, DIM, WIDTH, CAUSAL, WINDOW, CAP, LSE, UNIT, FP8, MAP, SPLIT, LONG_FIRST,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
