# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""extend_attention of a few tokens a request over fp8 keys and values apart, on Hopper, in Gluon.

A request's tokens with their query heads are up to 64 columns of products: more than `decode_attention_lanes.py` has
registers for, fewer than the rows of `extend_attention_hopper.py`, whose warps that fetch widen each key for 128. As in
`_few_heads.py` rows come to shared memory as they are, and on their way to registers they become the left operand of
`wgmma`, in fp16, which keys times queries and values times weights are. One group of four warps is a program, and
several programs share a multiprocessor: one's products run beside another's conversions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import _attention, _tiles
from hal.backends.cuda._attention import LN2, LOG2E
from hal.backends.cuda._fetch import exponent, magnitude, power
from hal.backends.cuda._fetch_rows import KEYS
from hal.backends.cuda._few_heads import (
    CHUNK,
    MAIN,
    NONE,
    PLAIN,
    QUERIES,
    UNITS,
    WORDS,
    _logits,
    _partly,
    _put,
    _slots_of,
)
from hal.backends.cuda.decode_attention_lanes import WORD, _begin, _halves, _there, _value_pairs
from hal.triton import launch

factor = gluon.jit(_attention.factor.fn)
tanh = gluon.jit(_attention.tanh.fn)
without = gluon.jit(_attention.without.fn)
find_own = gluon.jit(_tiles.find_own.fn)
idle = gluon.jit(_tiles.idle.fn)
note_none = gluon.jit(_tiles.note_none.fn)
note_tile = gluon.jit(_tiles.note.fn)
part_of = gluon.jit(_tiles.part_of.fn)
row_at = gluon.jit(_tiles.row_at.fn)
token_of = gluon.jit(_tiles.token_of.fn)

ABSENT = gl.constexpr(float("-inf"))
MOST = gl.constexpr(2.0**15)
"""Of the weights of two keys, so that each is fp16's."""
NARROW = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
"""A chunk by pairs of bytes."""


@gluon.constexpr_function
def _copied_by(MANY):
    """[chunks, rows, words]: 16 bytes a thread, whole rows side by side."""
    return gl.BlockedLayout([1, 1, 4], [MANY, 8 // MANY, 4], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def _slots_by(MANY):
    return gl.SliceLayout(0, gl.SliceLayout(2, _copied_by(MANY)))


@gluon.jit
def _copied(
    ring, stage, base, slot, num_slots, page, token, PAGE: gl.constexpr, UNIT: gl.constexpr, MANY: gl.constexpr
):
    """A tile's rows, of MANY chunks, into their place; zeros where there is none."""
    ROW: gl.constexpr = _copied_by(MANY)
    to = ring.index(stage * MANY)._reinterpret(gl.int32, [MANY, KEYS, WORDS], MAIN)
    c = gl.arange(0, MANY, gl.SliceLayout(1, gl.SliceLayout(2, ROW)))[:, None, None]
    d = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, ROW)))[None, None, :]
    ok = _there(slot, num_slots)
    at = _begin(gl.where(ok, slot, 0), page, token, PAGE) * (UNIT // WORD)
    async_copy.async_copy_global_to_shared(to, base + (c * WORDS + d) + at[None, :, None], ok[None, :, None])


@gluon.jit
def _value_words(ring, stage, i: gl.constexpr, MANY: gl.constexpr):
    """16 rows of a tile's values, from row i on: a warp has a fourth of the elements, a thread those of four rows."""
    if MANY == 2:
        READ: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 2, 0], [0, 8, 0]], [[0, 1, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 0, 8], [1, 0, 0]], [],
            [2, 16, WORDS],
        )  # fmt: skip
        return ring.index(stage * 2)._reinterpret(gl.int32, [2, KEYS, WORDS], MAIN).slice(i, 16, dim=1).load(READ)
    else:
        HALF: gl.constexpr = gl.DistributedLinearLayout(
            [[2, 0], [8, 0]], [[1, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [16, 2 * WORDS]
        )
        rows = ring.index(stage)._reinterpret(gl.int16, [KEYS, 2 * WORDS], NARROW).slice(i, 16)
        return rows.load(HALF).to(gl.uint16, bitcast=True).to(gl.int32)


@gluon.jit
def _values(words, D: gl.constexpr, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """They as columns of the left operand; which of the D elements a row of it is: `_in_order`."""
    if D == 128:
        # [chunk, 8s of a row's number, 4s, 2s, 1s, half a chunk, words]
        x = words.reshape([2, 2, 2, 2, 2, 2, 8]).permute((0, 1, 2, 4, 5, 6, 3))
        # [chunk, 8s, 4s, 1s, half, words, 2, 2: element of the word, 2: 2s]
        x = _value_pairs(x, KIND).permute((6, 0, 4, 7, 5, 1, 2, 3, 8))
    else:
        # [8s, 4s, 2s, 1s, fourth, pairs of bytes]
        a, b = gl.split(words.reshape([2, 2, 2, 2, 4, 8]).permute((0, 1, 3, 4, 5, 2)))
        x = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
        )
        # [8s, 4s, 1s, fourth, pairs, 2: element of the pair, 2: 2s]
        x = _halves(x, KIND).permute((3, 5, 4, 0, 1, 2, 6))
    return gl.convert_layout(x.reshape([D, 16]), OPERAND)


@gluon.jit
def _sums(acc, ring, stage, weights, KIND: gl.constexpr):
    """Sums, and a tile's values times its weights; the last product is under way."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    D: gl.constexpr = acc.shape[0]
    words = _value_words(ring, stage, 0, D // CHUNK)
    for i in gl.static_range(0, KEYS, 16):
        coming = words
        if i + 16 < KEYS:
            coming = _value_words(ring, stage, i + 16, D // CHUNK)
        acc = warpgroup_mma(_values(words, D, KIND, OPERAND), weights.slice(i, 16), acc, is_async=True)
        if i > 0:
            acc = warpgroup_mma_wait(1, [acc])
        words = coming
    return acc


@gluon.jit
def _seen(
    s, scales, there, num_slots, j, sees, window, cap, GROUP: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """Products as powers of two of weights, of the tile from entry j on; -inf where a column does not see a key."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    ENTRY: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    # Rows that are not there are zeros.
    absent = gl.where(_there(there, num_slots), 0.0, ABSENT)[:, None]
    if CAP:
        s = cap * LOG2E * tanh(s * scales.load(COLUMN)[None, :]) + absent
    else:
        s = s * scales.load(COLUMN)[None, :] + absent
    if TOKENS > 1:
        edge = j + KEYS > sees
        if WINDOW:
            edge = edge | (j < sees + (TOKENS - 2) - window)
        if edge:
            at = (j - sees + gl.arange(0, KEYS, ENTRY))[:, None]
            token = token_of(gl.arange(0, s.shape[1], COLUMN), GROUP, TOKENS)[None, :]
            seen = at < token
            if WINDOW:
                seen = seen & (at >= token - (1 + window))
            s = gl.where(seen, s, ABSENT)
    return s


@gluon.jit
def _put_weights(to, w):
    """In the order of `_values`."""
    H: gl.constexpr = w.shape[1]
    to.store(w.to(gl.float16).reshape([KEYS // 4, 2, 2, H]).permute((0, 2, 1, 3)).reshape([KEYS, H]))
    fence_async_shared()


@gluon.jit
def _in_order(acc):
    """``[columns, elements]`` of sums by `_values`."""
    H: gl.constexpr = acc.shape[1]
    if acc.shape[0] == 128:
        # [2: element of a word, chunk, half a chunk, 2: the same, words]
        x = acc.reshape([2, 2, 2, 2, 8, H]).permute((5, 1, 2, 4, 0, 3))
    else:
        # [fourth, 2: element of a pair, pairs]
        x = acc.reshape([4, 2, 8, H]).permute((3, 0, 2, 1))
    return x.reshape([H, acc.shape[0]])


@gluon.jit
def _queries(
    q, H: gl.constexpr, D: gl.constexpr, columns, q_row, q_head, UNIT: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Those of a tile, ``[columns, D]``."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    r = gl.arange(0, H, gl.SliceLayout(1, ROW))
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    at = q + ((row_at(r, q_row, q_head, GROUP, TOKENS) * UNIT)[:, None] + d)
    return gl.load(at, (r < columns)[:, None], other=0.0)


@gluon.jit
def _put_queries(to, x):
    """Queries in fp16, put into chunks; by what powers of two."""
    e = gl.full([x.shape[0]], 127, gl.int32, gl.SliceLayout(1, x.type.layout))
    if x.dtype != gl.float16:
        e = exponent(gl.max(magnitude(x), 1))
    x = (x.to(gl.float32) * power(e)[:, None]).to(gl.float16)
    _put(to.index(0)._reinterpret(gl.float16, to.shape, QUERIES), x)
    return e


@launch.jit(
    gluon=True,
    do_not_specialize=(
        "kv_indptr", "kv_indices", "lse", "part_lse", "k_scale", "v_scale", "q_row", "q_head", "kc_page",
        "kc_token", "kc_head", "vc_page", "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "bs",
        "programs", "window", "scale", "cap", "qo_indptr", "n",
    ),
)  # fmt: skip
def extend_attention_few_kernel(
    q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, part, part_lse, k_scale, v_scale,
    q_row: gl.int64, q_head: gl.int64, kc_page: gl.int64, kc_token: gl.int64, kc_head: gl.int64,
    vc_page: gl.int64, vc_token: gl.int64, vc_head: gl.int64, out_row: gl.int64, out_head: gl.int64,
    num_slots: gl.int64, nnz: gl.int64, bs: gl.int32, programs: gl.int32, window: gl.int32, scale, cap,
    qo_indptr, n: gl.int32,
    Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, K_KIND: gl.constexpr,
    V_KIND: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr, SHORTEST: gl.constexpr, FEW_PARTS: gl.constexpr,
    BLOCK: gl.constexpr, FEW: gl.constexpr, PDL: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    block = gl.program_id(0) % BLOCKS
    c = gl.program_id(0) // BLOCKS
    few = gl.arange(0, FEW, gl.BlockedLayout([FEW // 32], [32], [4], [0]))
    many = gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [4], [0]))
    LINES: gl.constexpr = Q_HEADS * TOKENS
    if idle(qo_indptr, few, many, c, n, bs, programs, TOKENS):
        note_none(qo_indptr, part_lse, False, c, n, bs, programs, LINES)
        return
    chunk, request, before, c, falls = find_own(
        qo_indptr, kv_indptr, few, many, c, n, nnz, bs, programs, window, SHORTEST, FEW_PARTS, 0, WINDOW, TOKENS, BLOCK
    )
    note_none(qo_indptr, part_lse, falls, c, n, bs, programs, LINES)

    KIND: gl.constexpr = k_cache.dtype.element_ty
    H: gl.constexpr = COLUMNS
    K_MANY: gl.constexpr = D // CHUNK
    V_MANY: gl.constexpr = DV // CHUNK
    VP: gl.constexpr = V_PAGE if V_PAGE else K_PAGE  # 0: v lies as k does
    K_SLOTS: gl.constexpr = _slots_by(K_MANY)
    V_SLOTS: gl.constexpr = _slots_by(V_MANY)
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LOGITS)
    ENTRY: gl.constexpr = gl.SliceLayout(1, LOGITS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    if request < bs:
        tile, begin, low, high, sees = part_of(
            qo_indptr, kv_indptr, request, c, before, falls, n, nnz, chunk, TOKENS, CAUSAL, KEYS, window, WINDOW
        )
        note_tile(part_lse, few, tile, c, falls, n, programs, LINES)
        parts = tile[4]
        row = tile[0].to(gl.int64)
        columns = tile[1] * GROUP
        kv_head = block.to(gl.int64)
        first = kv_head * GROUP
        k_base = k_cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * (kc_head * (UNIT // WORD))
        v_base = v_cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * (vc_head * (UNIT // WORD))
        slots = kv_indices + begin.to(gl.int64)

        slot = _slots_of(slots, low, high, K_SLOTS)
        # Before rows are asked for, behind which they would have to wait.
        x = _queries(
            q + (row * q_row + first * q_head) * UNIT, H, D, columns, q_row, q_head, UNIT, GROUP, TOKENS
        )  # fmt: skip
        k_ring = gl.allocate_shared_memory(gl.int32, [STAGES * K_MANY, KEYS, WORDS], PLAIN)
        v_ring = gl.allocate_shared_memory(gl.int32, [STAGES * V_MANY, KEYS, WORDS], PLAIN)
        for i in gl.static_range(STAGES):
            after = _slots_of(slots, low + (i + 1) * KEYS, high, K_SLOTS)
            _copied(k_ring, i, k_base, slot, num_slots, kc_page, kc_token, K_PAGE, UNIT, K_MANY)
            async_copy.commit_group()
            if i + 1 < STAGES:
                v_slot = gl.convert_layout(slot, V_SLOTS)
                _copied(v_ring, i, v_base, v_slot, num_slots, vc_page, vc_token, VP, UNIT, V_MANY)
                async_copy.commit_group()
            slot = after

        CHUNKED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([H, CHUNK], gl.float16)
        WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, H], gl.float16)
        q_tiles = gl.allocate_shared_memory(gl.float16, [K_MANY, H, CHUNK], CHUNKED)
        p = gl.allocate_shared_memory(gl.float16, [KEYS, H], WEIGHTS)
        tops = gl.allocate_shared_memory(gl.float32, [H], FLAT)
        scales = gl.allocate_shared_memory(gl.float32, [H], FLAT)
        largest = gl.allocate_shared_memory(gl.float32, [4], FLAT)
        e = _put_queries(q_tiles, x)
        by = gl.full([H], scale * factor(k_scale, K_KIND), gl.float32, COLUMN)
        by = without(by, gl.convert_layout(e, COLUMN))
        if CAP:
            scales.store(by / cap)
        else:
            scales.store(by * LOG2E)
        tops.store(gl.full([H], NONE, gl.float32, COLUMN))
        fence_async_shared()

        none = gl.zeros([KEYS, H], gl.float32, LOGITS)
        acc = gl.zeros([DV, H], gl.float32, LOGITS)
        total = _partly(none)
        stage = 0
        for j in range(low, high, KEYS):
            async_copy.wait_group(2 * STAGES - 2)
            gl.thread_barrier()
            # Not before: what is made of slots would be waited for where they are asked for.
            there = _slots_of(slots, j, high, ENTRY)
            v_slot = _slots_of(slots, j + (STAGES - 1) * KEYS, high, V_SLOTS)
            s = warpgroup_mma_wait(0, [_logits(k_ring, q_tiles, stage, none, 0, KIND)])
            # One of the two barriers is between this and who read what lay there, the other between this and who reads
            # it, as of the next keys below: so Triton puts no third in.
            if j + (STAGES - 1) * KEYS < high:
                into = gl.where(stage == 0, STAGES, stage) - 1
                _copied(v_ring, into, v_base, v_slot, num_slots, vc_page, vc_token, VP, UNIT, V_MANY)
            async_copy.commit_group()
            k_slot = _slots_of(slots, j + STAGES * KEYS, high, K_SLOTS)
            s = _seen(s, scales, there, num_slots, j, sees, window, cap, GROUP, TOKENS, WINDOW, CAP)
            w = gl.exp2(s - tops.load(COLUMN)[None, :])
            part_total = _partly(w)
            largest.store(gl.max(part_total.reshape([4, 8 * H]), 1))
            _put_weights(p, w)
            async_copy.wait_group(2 * STAGES - 2)
            gl.thread_barrier()
            if gl.max(largest.load(gl.BlockedLayout([4], [32], [4], [0])), 0) > MOST:
                was = tops.load(COLUMN)
                top = gl.maximum(was, gl.max(s, 0) - UNITS)
                gl.thread_barrier()
                tops.store(top)
                keep = gl.exp2(was - top)
                total = total * gl.convert_layout(keep, gl.SliceLayout(0, total.type.layout))[None, :]
                acc = acc * keep[None, :]
                w = gl.exp2(s - top[None, :])
                part_total = _partly(w)
                _put_weights(p, w)
                gl.thread_barrier()
            if j + STAGES * KEYS < high:
                _copied(k_ring, stage, k_base, k_slot, num_slots, kc_page, kc_token, K_PAGE, UNIT, K_MANY)
            async_copy.commit_group()
            total += part_total
            acc = warpgroup_mma_wait(0, [_sums(acc, v_ring, stage, p, KIND)])
            stage += 1
            if stage == STAGES:
                stage = 0
        async_copy.wait_group(0)
        if PDL:
            gdc_launch_dependents()

        full = gl.convert_layout(gl.sum(total, 0), COLUMN)
        some = full != 0.0
        full = gl.where(some, full, 1.0)
        sums = gl.where(some, tops.load(COLUMN) + gl.log2(full), ABSENT)
        acc = acc * (factor(v_scale, V_KIND) / full)[None, :]
        TO: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (DV // 4), DV // 4], [4, 1], [1, 0])
        acc = gl.convert_layout(_in_order(acc), TO)
        d = gl.arange(0, DV, gl.SliceLayout(0, TO))[None, :]
        h = gl.arange(0, H, gl.SliceLayout(1, TO))
        mine = (h < columns)[:, None]
        one = gl.arange(0, H, COLUMN)
        if parts == 1:
            to = out + (row * out_row + first * out_head) * UNIT
            to += (row_at(h, out_row, out_head, GROUP, TOKENS) * UNIT)[:, None] + d
            gl.store(to, acc.to(out.dtype.element_ty), mine)
            if LSE:
                to = lse + row * Q_HEADS + first + row_at(one, Q_HEADS, 1, GROUP, TOKENS)
                gl.store(to, sums * LN2, one < columns)
        else:
            line = c.to(gl.int64) * LINES + first
            gl.store(part + (line + row_at(h, Q_HEADS, 1, GROUP, TOKENS))[:, None] * DV + d, acc, mine)
            gl.store(part_lse + line + row_at(one, Q_HEADS, 1, GROUP, TOKENS), sums, one < columns)
