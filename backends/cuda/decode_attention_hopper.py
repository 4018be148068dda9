# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""decode_attention over MLA's shared rows on Hopper, in Gluon: rows of 576 are read once, as keys and as values.

Twelve warps in three roles. One group fetches tiles of 64 rows into two buffers. The other two take the tiles in turn:
the group whose buffer it is makes the logits of a tile and their softmax, and leaves the weights where the rotated part
of its keys was, which nobody reads any more. Each group sums half of the values of every tile, since 64 x 512 sums do
not fit the registers of one: its own tiles' by weights in its registers, the other's by those in shared memory. So the
softmax of one tile runs under the products of the other. Halves of a buffer are filled and freed apart: how rows of 16
bits come is in `_fetch_rows.py`, of fp8 in `_fetch_latent.py`. Rows of fp8 under few query heads are multiplied
otherwise: `_few_heads.py`. Which keys of which requests are a program's: `_shares.py`; it takes the requests one after
the other. Another launch merges the parts.

Source of the two groups' turns: FlashMLA's "seesaw" schedule (DeepSeek, deep dive of 2025-04-22).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import _attention, _shares, _split, _tiles
from hal.backends.cuda._attention import LN2, LOG2E
from hal.backends.cuda._fetch_latent import fetch_latent, scale_queries
from hal.backends.cuda._fetch_rows import BOX, HALF, KEYS, fetch_rows
from hal.backends.cuda._few_heads import begin_few, end_few, fetch_few, share_few, work_few
from hal.backends.cuda._parts import leave_part
from hal.backends.cuda.extend_attention_hopper import ABSENT, ROWS, SHIFT, _barriers, _by_row, _zero
from hal.triton import launch

factor = gluon.jit(_attention.factor.fn)
find_tiles = gluon.jit(_tiles.find_shares.fn)
find_shares = gluon.jit(_shares.find_own.fn)
keys_of = gluon.jit(_shares.keys_of.fn)
note = gluon.jit(_split.note.fn)
note_none = gluon.jit(_tiles.note_none.fn)
note_tile = gluon.jit(_tiles.note.fn)
part_of = gluon.jit(_tiles.part_of.fn)
tile_after = gluon.jit(_tiles.after.fn)
tile_share = gluon.jit(_tiles.share_of.fn)
positive = gluon.jit(_attention.positive.fn)
BEGUN = _shares.BEGUN
row_at = gluon.jit(_tiles.row_at.fn)
token_of = gluon.jit(_tiles.token_of.fn)
without = gluon.jit(_attention.without.fn)

DIMS = (576, 512)
"""The head_dim and v_head_dim that the kernel is for: two halves, and a rotated part of 64."""
ROWS_MAP = launch.Map(
    "map", of="k_cache", rows="num_slots", stride="kc_page", unit="UNIT", columns=DIMS[0], box=(64, 64), when="MAP"
)
"""Of a cache's rows, all of one key head."""
REGISTERS = gl.constexpr(208)
"""Of a thread that multiplies; what is left of 504 has each that fetches. Found by looking for spills."""
MAP_REGISTERS = gl.constexpr(216)
"""The same where rows come by boxes, so that who fetches has few."""
FP8_REGISTERS = gl.constexpr(200)
"""The same over fp8: rows under way to being widened are in registers."""
SLACK = gl.constexpr(10)
"""Tiles more than its share that a program may have, so that there are fewer parts (`_shares.py`): what their merging
takes. As measured: docs/performance-mla.md."""
FEW_HEADS_SLACK = gl.constexpr(6)
"""The same of few query heads over fp8, of which a part is less."""
ROWS_SLACK = gl.constexpr(20)
"""The same of rows of 16 bits that one program reads for all query heads: some programs already read as fast as all."""


@gluon.jit
def _multiply(W: gl.constexpr, STEP: gl.constexpr, q_tiles, k, full, phase, s, zero):
    """Queries times half W + STEP of the rows of buffer W, begun once it is there."""
    mbarrier.wait(full.index(2 * W + STEP), phase)
    fence_async_shared()  # copies are seen by `wgmma` only past one
    rows = k[(W + STEP) % 2].index(W + zero).permute((1, 0))
    s = warpgroup_mma(q_tiles[(W + STEP) % 2].index(zero), rows, s, use_acc=STEP > 0, is_async=True)
    if STEP == 1:
        s = warpgroup_mma(q_tiles[2].index(zero), k[2].index(W + zero).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _shrink(top, new):
    """(what is subtracted from logits, what earlier sums shrink by) where the largest logit grew from top to new."""
    base = gl.where(new == ABSENT, 0.0, new)
    return base, gl.exp2(top - base)


@gluon.jit
def _softmax(s, top, there, edge, j, high, first, by, FP8: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr):
    """(weights, what earlier sums shrink by, largest logit) of a tile of products from entry j on."""
    ENTRIES: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    if edge:
        entries = j + gl.arange(0, KEYS, ENTRIES)
        seen = ((there.load(ENTRIES) != 0) & (entries < high))[None, :]
        if TOKENS > 1:
            last = first + token_of(gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)), GROUP, TOKENS)
            seen = seen & (entries[None, :] < last[:, None])
        s = gl.where(seen, s, ABSENT)
    # Rounded once: as a fused top * by - base, where top stays, is not 0, sums would shrink with each tile.
    new = gl.maximum(top, gl.max(s, 1) * by)
    base, keep = _shrink(top, new)
    if FP8:
        base = base - SHIFT
    return gl.exp2(s * _by_row(by, FP8) - base[:, None]), keep, new


@gluon.jit
def _shrunk(acc, keep):
    return acc * gl.convert_layout(keep, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _begin_theirs(PART: gl.constexpr, acc, top, total, k, tops, p_full, ready, zero, ROW: gl.constexpr):
    """The sums of the other group's tile by its weights, begun; the largest logit by now, and the sum of weights."""
    mbarrier.wait(p_full.index(1 - PART), ready)
    fence_async_shared()
    new = tops.index(1 - PART).load(ROW)
    _, keep = _shrink(top, new)
    begun = warpgroup_mma(
        k[2].index(1 - PART + zero), k[PART].index(1 - PART + zero), _shrunk(acc, keep), is_async=True
    )
    return begun, new, total * keep


@gluon.jit
def _leave(way, acc, out, heads, out_row, out_head, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr):
    """Sums, by way of the queries' tile, which nobody reads any more: so they leave in rows of whole sectors."""
    D: gl.constexpr = way.shape[1]
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    way = way._reinterpret(out.dtype.element_ty, [ROWS, D], way.layout)
    way.store(acc.to(way.dtype))
    r = gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    at = out + (row_at(r, out_row, out_head, GROUP, TOKENS)[:, None] * UNIT + d)
    gl.store(at, way.load(ROW), (r < heads)[:, None])


@gluon.jit
def _work(
    PART: gl.constexpr, q, out, lse, part, part_lse, heads, parts, low, high, first, tiles, q_tiles, k, there, tops,
    totals, exponents, q_full, full, empty, p_full, done, by, sign, v_factor, q_row, q_head, out_row, out_head,
    LSE: gl.constexpr, UNIT: gl.constexpr, FP8: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    HALVES: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Softmax of tiles PART, PART + 2, ..., and half PART of the sums of all."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    EACH: gl.constexpr = gl.BlockedLayout([KEYS // 32], [32], [gl.num_warps()], [0])
    top = gl.full([ROWS], ABSENT, gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    none = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
    acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    if FP8:
        FIRST: gl.constexpr = PART * ROWS // 2
        own = exponents.slice(FIRST, ROWS // 2)
        scale_queries(q, q_tiles, own, FIRST, heads, q_row, q_head, sign, UNIT, GROUP, TOKENS)
        gl.thread_barrier()
        mbarrier.arrive(q_full)
    mbarrier.wait(q_full, 0)
    if FP8:
        by = positive(without(by, exponents.load(ROW))) * LOG2E
    else:
        fence_async_shared()
    phase = 0
    ready = 0
    for t in range(PART, tiles, 2):
        j = low + t * KEYS
        zero = _zero(t)
        if t > 0:
            begun, top, total = _begin_theirs(PART, acc, top, total, k, tops, p_full, ready, zero, ROW)
            s_begun = _multiply(PART, 0, q_tiles, k, full, phase, none, zero)
            acc = warpgroup_mma_wait(1, [begun])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(2 * (1 - PART) + 1))
            ready ^= 1
        else:
            s_begun = _multiply(PART, 0, q_tiles, k, full, phase, none, zero)
        s_begun = _multiply(PART, 1, q_tiles, k, full, phase, s_begun, zero)
        edge = (j + KEYS > high) | (gl.min(there.index(PART).load(EACH), 0) == 0)
        if TOKENS > 1:
            edge = edge | (j + KEYS > first)
        s = warpgroup_mma_wait(0, [s_begun])
        p, keep, top = _softmax(s, top, there.index(PART), edge, j, high, first, by, FP8, GROUP, TOKENS)
        p16 = p.to(k[2].dtype)
        tops.index(PART).store(top)
        k[2].index(PART + zero).store(p16)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(p_full.index(PART))
        total = total * keep + gl.sum(p, 1)
        weights = gl.convert_layout(p16, gl.DotOperandLayout(0, SUMS, 2))
        acc = warpgroup_mma(weights, k[PART].index(PART + zero), _shrunk(acc, keep))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(2 * PART))
        phase ^= 1
    if (tiles - 1) % 2 != PART:
        zero = _zero(tiles)
        begun, top, total = _begin_theirs(PART, acc, top, total, k, tops, p_full, ready, zero, ROW)
        acc = warpgroup_mma_wait(0, [begun])

    totals.index(PART).store(total)
    gl.thread_barrier()
    mbarrier.arrive(done)
    most = gl.max(gl.abs(acc), 1) if HALVES else acc  # looked for while the other group is waited for
    mbarrier.wait(done, 0)
    total += totals.index(1 - PART).load(ROW)
    some = total != 0.0
    whole = gl.where(some, total, 1.0)
    if PART == 0:
        r = gl.arange(0, ROWS, ROW)
        logs = top + gl.log2(whole)
        if FP8:
            logs = logs - SHIFT
        logs = gl.where(some, logs, ABSENT)
        if parts == 1:
            if LSE:
                gl.store(lse + r, logs * LN2, r < heads)
        else:
            gl.store(part_lse + r, logs, r < heads)
    share = gl.convert_layout(v_factor / whole, gl.SliceLayout(1, SUMS))
    if parts == 1:
        way = q_tiles[PART].index(0)
        _leave(way, acc * share[:, None], out + PART * HALF, heads, out_row, out_head, UNIT, GROUP, TOKENS)
    else:
        line = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        leave_part(acc, most, share, part, line, line < heads, 2 * HALF, PART, HALVES, PAIRED)


@gluon.jit
def _init_barriers(q_full, done, full, empty, p_full, FP8: gl.constexpr, MAP: gl.constexpr):
    """The program's barriers: how many arrive at each."""
    mbarrier.init(q_full, count=2 if FP8 else 128)
    mbarrier.init(done, count=2)
    for w in gl.static_range(2):
        mbarrier.init(p_full.index(w), count=1)
        for i in gl.static_range(2):
            mbarrier.init(full.index(2 * w + i), count=1 if FP8 else 128 + i + MAP)
            mbarrier.init(empty.index(2 * w + i), count=1)


@gluon.jit
def _launch_where(some):
    """`gdc_launch_dependents`, where `some`. Not behind a branch, for which who fetches would put registers aside."""
    LAUNCH: gl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(LAUNCH, "=r,r", [some.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tell(part_lse, alone, late):
    """Whether there is something to merge, to the launch that does, before it may begin, where that is `late`: where
    there is not, all of its programs but one need not wait for this launch's end. Seen by all before any warp says that
    it may begin."""
    # The first program's; not behind a branch, for which who fetches would put registers aside.
    STORE: gl.constexpr = """{ .reg .pred p; setp.eq.s32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], $2;
        @p fence.acq_rel.gpu; mov.b32 $0, 0; }"""
    some = [(part_lse - 1).to(gl.int64), gl.where(alone, 0, 1), gl.program_id(0) | (1 - late)]
    gl.inline_asm_elementwise(STORE, "=r,l,r,r", some, dtype=gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()


@gluon.jit
def _keep(to, i: gl.constexpr, x):
    """A number, for all warps that get to it past a barrier."""
    to.index(i).store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def _kept(where, i: gl.constexpr):
    return gl.max(where.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _end_barriers(q_full, done, full, empty, p_full):
    """Behind a request, before the next begins them anew."""
    mbarrier.invalidate(q_full)
    mbarrier.invalidate(done)
    for w in gl.static_range(2):
        mbarrier.invalidate(p_full.index(w))
        for i in gl.static_range(2):
            mbarrier.invalidate(full.index(2 * w + i))
            mbarrier.invalidate(empty.index(2 * w + i))


@launch.jit(
    gluon=True,
    maps=(ROWS_MAP,),
    do_not_specialize=(
        "kv_indptr", "kv_indices", "lse", "part_lse", "q_row", "q_head", "kc_page", "kc_token", "kc_head", "vc_page",
        "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "bs", "programs", "window", "scale", "cap",
        "qo_indptr", "n", "late",
    ),
)  # fmt: skip
def decode_attention_hopper_kernel(
    q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, part, part_lse, k_scale, v_scale,
    q_row: gl.int64, q_head: gl.int64, kc_page: gl.int64, kc_token: gl.int64, kc_head: gl.int64,
    vc_page: gl.int64, vc_token: gl.int64, vc_head: gl.int64, out_row: gl.int64, out_head: gl.int64,
    num_slots: gl.int64, nnz: gl.int64, bs: gl.int32, programs: gl.int32, window: gl.int32, scale, cap,
    qo_indptr, n: gl.int32, late: gl.int32, map,
    Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, WINDOW: gl.constexpr, LSE: gl.constexpr,
    UNIT: gl.constexpr, SHORTEST: gl.constexpr, FEW_PARTS: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr,
    PDL: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr,
    MAP: gl.constexpr, FEW_HEADS: gl.constexpr, HALVES: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    FP8: gl.constexpr = k_cache.dtype.element_ty != q.dtype.element_ty
    if FEW_HEADS:
        room = share_few(GROUP, TOKENS)
        begin_few(room[5])
    else:
        dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
        WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], dtype)
        NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, KEYS], dtype)
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        # The rotated part's tile takes the weights, 64 queries by 64 keys, once its products are done.
        EACH: gl.constexpr = 2 * HALF // BOX
        if FP8:
            # Each apart: Triton puts a barrier between stores that might be to the same place.
            q_tiles = (
                gl.allocate_shared_memory(dtype, [1, ROWS, HALF], WIDE),
                gl.allocate_shared_memory(dtype, [1, ROWS, HALF], WIDE),
                gl.allocate_shared_memory(dtype, [1, ROWS, BOX], NARROW),
            )
            q_boxes = q_tiles[2]
            k = (
                gl.allocate_shared_memory(dtype, [2, KEYS, HALF], WIDE),
                gl.allocate_shared_memory(dtype, [2, KEYS, HALF], WIDE),
                gl.allocate_shared_memory(dtype, [2, KEYS, BOX], NARROW),
            )
            all = k[2]
        else:
            q_boxes = gl.allocate_shared_memory(dtype, [EACH + 1, ROWS, BOX], NARROW)
            q_tiles = (
                q_boxes.index(0)._reinterpret(dtype, [1, ROWS, HALF], WIDE),
                q_boxes.index(EACH // 2)._reinterpret(dtype, [1, ROWS, HALF], WIDE),
                q_boxes.index(EACH)._reinterpret(dtype, [1, ROWS, BOX], NARROW),
            )
            all = gl.allocate_shared_memory(dtype, [2 * EACH + 2, KEYS, BOX], NARROW)
            k = (
                all.index(0)._reinterpret(dtype, [2, KEYS, HALF], WIDE),
                all.index(EACH)._reinterpret(dtype, [2, KEYS, HALF], WIDE),
                all.index(2 * EACH)._reinterpret(dtype, [2, KEYS, BOX], NARROW),
            )
        rows = gl.allocate_shared_memory(gl.int64, [2, KEYS], FLAT)
        there = gl.allocate_shared_memory(gl.int8, [2, KEYS], FLAT)
        tops = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
        totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
        exponents = tops
        if FP8:
            exponents = gl.allocate_shared_memory(gl.int32, [ROWS], FLAT)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full, empty, p_full = _barriers(4), _barriers(4), _barriers(2)
        _init_barriers(q_full, done, full, empty, p_full, FP8, MAP)
    if PDL:
        gdc_wait()
        if TOKENS:
            gdc_launch_dependents()
        else:
            _launch_where(late == 0)
    c = gl.program_id(0) // BLOCKS
    few = gl.arange(0, FEW, gl.BlockedLayout([FEW // 32], [32], [gl.num_warps()], [0]))
    many = gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
    LINES: gl.constexpr = Q_HEADS * max(TOKENS, 1)
    MOST_TOKENS: gl.constexpr = 64 if TOKENS > 32 else 32
    MORE: gl.constexpr = FEW_HEADS_SLACK if FEW_HEADS else SLACK if FP8 or GROUP > ROWS else ROWS_SLACK
    if TOKENS:
        keys, share, first_request, first_tile, first_unit, before, falls = find_tiles(
            qo_indptr, kv_indptr, few, many, c, n, nnz, bs, programs, SHORTEST, FEW_PARTS, TOKENS, KEYS, MORE
        )
        note_none(qo_indptr, part_lse, falls, c, n, bs, programs, LINES)
        stop_request = bs
    else:
        keys, share, first_request, stop_request, before, alone = find_shares(
            kv_indptr, few, many, c, nnz, bs, programs, SHORTEST, FEW_PARTS, KEYS, MORE
        )
        _tell(part_lse, alone, late)
        if PDL:
            gdc_launch_dependents()

    # While a request is worked on registers are short: what is needed after it is in shared memory.
    own = gl.allocate_shared_memory(gl.int32, [9, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _keep(own, 0, first_request)
    _keep(own, 1, stop_request)
    _keep(own, 2, before)
    _keep(own, 3, keys)
    _keep(own, 4, share)
    _keep(own, 5, c)
    if TOKENS:
        _keep(own, 6, first_tile)
        _keep(own, 7, first_unit)
        _keep(own, 8, falls.to(gl.int32))
    more = first_request < stop_request
    while more:
        request = _kept(own, 0)
        before = _kept(own, 2)
        c = _kept(own, 5)
        zero = 0
        if TOKENS:
            # What follows from arguments alone would be kept over all tiles.
            zero = _zero(request)
        else:
            _keep(own, 0, request + 1)
        block = (gl.program_id(0) + zero) % BLOCKS
        kv_head = (block // (BLOCKS * GROUP // Q_HEADS)).to(gl.int64)
        member = block % (BLOCKS * GROUP // Q_HEADS) * ROWS
        heads = gl.minimum(GROUP - member, ROWS)
        head = kv_head * GROUP + member
        if TOKENS:
            some, all_keys, requests = n + zero, nnz + zero, bs + zero
            falls = _kept(own, 8) != 0
            own_share = _kept(own, 4)
            unit = _kept(own, 7)
            next_request = requests
            if own_share > 0:
                tile, begin, low, high, first, after, tiles_of = tile_share(
                    qo_indptr, kv_indptr, request, _kept(own, 6), c, before, own_share, some, all_keys, TOKENS, CAUSAL,
                    KEYS,
                )  # fmt: skip
                if after + BEGUN < (c + 1) * own_share:
                    next_request, next_tile = tile_after(
                        qo_indptr, request, _kept(own, 6), tiles_of, some, requests, TOKENS
                    )
                    _keep(own, 2, after)
                    _keep(own, 6, next_tile)
                    _keep(own, 7, unit + 1)
            else:
                tile, begin, low, high, first = part_of(
                    qo_indptr, kv_indptr, request, c, before, falls, some, all_keys, _kept(own, 3), TOKENS, CAUSAL, KEYS
                )
            _keep(own, 0, next_request)
            each = gl.arange(0, MOST_TOKENS, gl.BlockedLayout([MOST_TOKENS // 32], [32], [gl.num_warps()], [0])) + zero
            note_tile(part_lse, each, tile, c + unit, falls, some, programs + zero, LINES)
            parts = tile[4]
            row = tile[0].to(gl.int64)
            if TOKENS > 1:
                heads = tile[1] * GROUP
            part_line = c + unit
        else:
            begin, parts, low, high, part_line, leads, after = keys_of(
                kv_indptr, request, c, before, nnz, _kept(own, 3), _kept(own, 4), KEYS
            )
            _keep(own, 2, after)
            note(part_lse, request, part_line, leads, parts, bs, programs, Q_HEADS)
            row = request.to(gl.int64)
            first = high
        tiles = gl.maximum((high - low + (KEYS - 1)) // KEYS, 1)
        line = part_line.to(gl.int64) * LINES + head
        q_at = q + (row * q_row + head * q_head) * UNIT
        out_at = out + (row * out_row + head * out_head) * UNIT
        lse_at = part_lse  # of no use
        if LSE:
            lse_at = lse + (row * Q_HEADS + head)
        part_at = part + line * (2 * HALF)
        part_lse_at = part_lse + line
        by = scale * factor(k_scale, K_KIND)
        if TOKENS:
            by += zero.to(gl.float32)
        v_factor = factor(v_scale, V_KIND)
        sign = 1.0
        if FP8:
            # The greatest product is the greatest logit only by a factor above 0.
            sign = gl.where(by < 0, -1.0, 1.0)
            by = gl.abs(by)
        else:
            by = positive(by) * LOG2E
        # What warps are given lies side by side: behind a truth value, which is a byte, they would read it by bytes.
        if FEW_HEADS:
            WIDE_EXPONENT: gl.constexpr = k_cache.dtype.element_ty == gl.float8e5
            gl.warp_specialize(
                [
                    (fetch_few, (
                        k_cache + kv_head * kc_head * UNIT, kv_indices + begin, low, high, tiles, room, kc_page,
                        num_slots, UNIT,
                    )),
                    (work_few, (
                        0, q_at, out_at, lse_at, part_at, part_lse_at, heads, parts, low, high, first, tiles, room,
                        by, sign, v_factor, q_row, q_head, out_row, out_head, LSE, UNIT, WIDE_EXPONENT, GROUP, TOKENS,
                    )),
                    (work_few, (
                        1, q_at, out_at, lse_at, part_at, part_lse_at, heads, parts, low, high, first, tiles, room,
                        by, sign, v_factor, q_row, q_head, out_row, out_head, LSE, UNIT, WIDE_EXPONENT, GROUP, TOKENS,
                    )),
                ],
                [4, 4],
                [FP8_REGISTERS, FP8_REGISTERS],
            )  # fmt: skip
        else:
            OWN: gl.constexpr = FP8_REGISTERS if FP8 else MAP_REGISTERS if MAP else REGISTERS
            gl.warp_specialize(
                [
                    (fetch_latent if FP8 else fetch_rows, (
                        q_at, k_cache + kv_head * kc_head * UNIT, map, kv_indices + begin, heads, low, high, tiles,
                        q_boxes, k, all, there, rows, q_full, full, empty, q_row, q_head, kc_page, num_slots, UNIT,
                        GROUP, TOKENS, MAP,
                    )),
                    (_work, (
                        0, q_at, out_at, lse_at, part_at, part_lse_at, heads, parts, low, high, first, tiles,
                        q_tiles, k, there, tops, totals, exponents, q_full, full, empty, p_full, done, by, sign,
                        v_factor, q_row, q_head, out_row, out_head, LSE, UNIT, FP8, GROUP, TOKENS, HALVES, PAIRED,
                    )),
                    (_work, (
                        1, q_at, out_at, lse_at, part_at, part_lse_at, heads, parts, low, high, first, tiles,
                        q_tiles, k, there, tops, totals, exponents, q_full, full, empty, p_full, done, by, sign,
                        v_factor, q_row, q_head, out_row, out_head, LSE, UNIT, FP8, GROUP, TOKENS, HALVES, PAIRED,
                    )),
                ],
                [4, 4],
                [OWN, OWN],
            )  # fmt: skip
        more = _kept(own, 0) < _kept(own, 1)
        if more:
            if FEW_HEADS:
                end_few(room[5])
                begin_few(room[5])
            else:
                _end_barriers(q_full, done, full, empty, p_full)
                _init_barriers(q_full, done, full, empty, p_full, FP8, MAP)
