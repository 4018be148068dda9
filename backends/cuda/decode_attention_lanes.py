# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""decode_attention over an fp8 cache on Hopper, in Gluon: rows go from memory straight into the operands of products.

Triton brings a tile to shared memory, to registers, as 16 bits to shared memory again, and from there to the products:
for fp8 that traffic is the time. Here each thread loads the very elements of which it holds the operand's: 16 bytes of
a key, whose elements the queries are put in the order of, and 16 bytes of values of several keys, which become columns.
Both are the left operand, so a product is as narrow as a group of query heads, and each warp has keys of its own and a
running softmax of its own: no shared memory, and no barrier, until the warps' parts become one at the end. fp8 is
exact in fp16; what that needs of the queries is in `decode_attention_kernel`, as is which keys are a program's. A few
query tokens of a request, with their heads, are columns too (extend_attention's, `_tokens.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import _attention, _split, _tiles
from hal.backends.cuda._attention import LN2, LOG2E
from hal.triton import launch

exponent = gluon.jit(_attention.exponent.fn)
factor = gluon.jit(_attention.factor.fn)
magnitude = gluon.jit(_attention.magnitude.fn)
place = gluon.jit(_attention.place.fn)
power = gluon.jit(_attention.power.fn)
tanh = gluon.jit(_attention.tanh.fn)
without = gluon.jit(_attention.without.fn)
keys_of = gluon.jit(_split.keys_of.fn)
note = gluon.jit(_split.note.fn)
find_own = gluon.jit(_tiles.find_own.fn)
idle = gluon.jit(_tiles.idle.fn)
note_none = gluon.jit(_tiles.note_none.fn)
note_tile = gluon.jit(_tiles.note.fn)
part_of = gluon.jit(_tiles.part_of.fn)
row_at = gluon.jit(_tiles.row_at.fn)
token_of = gluon.jit(_tiles.token_of.fn)

SHIFT = gl.constexpr(15)
"""Weights are up to 2^SHIFT, and what is above 2^-29 of the largest is as exact as fp16 can have it."""
WORD = gl.constexpr(4)
"""Elements of an int32, as which rows are loaded: a loop would carry bytes in a register each."""
E4M3 = gl.constexpr("{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}")
E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;")


@gluon.constexpr_function
def _bits(low, high):
    """The powers of two from `low` on below `high`."""
    return [1 << i for i in range(low.bit_length() - 1, high.bit_length() - 1)]


@gluon.constexpr_function
def _key_layout(W, N, D, V):
    """[warps, keys, words]: a thread has V words of a row, the next three the next ones: as rows of a left operand."""
    regs = [[0, 0, d] for d in (*_bits(1, V), *_bits(4 * V, D))] + [[0, n, 0] for n in _bits(8, N)]
    lanes = [[0, 0, V], [0, 0, 2 * V], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[w, 0, 0] for w in _bits(1, W)], [], [W, N, D])


@gluon.constexpr_function
def _value_layout(W, N, D, V):
    """[warps, keys, words]: a thread has V words of two rows, the next three of other rows: as columns of one."""
    regs = [[0, 0, d] for d in _bits(1, V)] + [[0, n, 0] for n in (1, *_bits(8, N))]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, V], [0, 0, 2 * V], [0, 0, 4 * V]]
    regs += [[0, 0, d] for d in _bits(8 * V, D)]
    return gl.DistributedLinearLayout(regs, lanes, [[w, 0, 0] for w in _bits(1, W)], [], [W, N, D])


@gluon.jit
def _slots(slots, j, high, W: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Slots of entries [j, j + W N), N a warp; -1 from `high` on."""
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None]
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
    entries = j + w * N + n
    return gl.load(slots + entries, entries < high, other=-1)


@gluon.jit
def _there(slot, num_slots):
    """Which slots there are; int32 ones are compared as such."""
    if slot.dtype == gl.int32:
        return slot.to(gl.uint32, bitcast=True) < gl.minimum(num_slots, 2**31).to(gl.uint32)
    return (slot >= 0) & (slot < num_slots)


@gluon.jit
def _sees(s, j, window, GROUP: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr):
    """Which key is seen by which column, of logits ``[warps, keys, columns]``: j is how far behind those that the first
    token sees the tile begins, and each next token sees one more, of a WINDOW from one further on."""
    EACH: gl.constexpr = gl.SliceLayout(2, s.type.layout)
    w = gl.arange(0, s.shape[0], gl.SliceLayout(1, EACH))[:, None]
    n = gl.arange(0, s.shape[1], gl.SliceLayout(0, EACH))[None, :]
    h = gl.arange(0, s.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, s.type.layout)))
    at = (j + w * s.shape[1] + n)[:, :, None]
    token = token_of(h, GROUP, TOKENS)[None, None, :]
    seen = at < token
    if WINDOW:
        seen = seen & (at >= token - (1 + window))
    return seen


@gluon.jit
def _begin(slot, page, token, PAGE: gl.constexpr):
    """Where the rows of slots begin. `page` fits an int32."""
    if slot.dtype == gl.int32 and PAGE == 1:  # one instruction instead of six
        return gl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [slot, page.to(gl.int32)], dtype=gl.int64, is_pure=True, pack=1
        )
    else:
        return place(slot.to(gl.int64), page, token, PAGE)


@gluon.jit
def _rows(base, slot, num_slots, page, token, PAGE: gl.constexpr, UNIT: gl.constexpr, D: gl.constexpr,
          LAYOUT: gl.constexpr):  # fmt: skip
    """Rows of D words; zeros where there is none. `page` fits an int32."""
    at = _begin(slot, page, token, PAGE)
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.load(base + (at * (UNIT // WORD))[:, :, None] + d, _there(slot, num_slots)[:, :, None], other=0)


@gluon.jit
def _halves(x, kind: gl.constexpr):
    """The fp8 elements of words as fp16: ``[..., 2, 2]`` behind the words' own dims."""
    a, b = gl.inline_asm_elementwise(
        E5M2 if kind == gl.float8e5 else E4M3, "=&r,=&r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    x = gl.join(a, b)
    return gl.join(x.to(gl.int16), (x >> 16).to(gl.int16)).to(gl.float16, bitcast=True)


@gluon.jit
def _keys(k, KIND: gl.constexpr, V: gl.constexpr, OPERAND: gl.constexpr):
    """Rows as the left operand, their elements in the order of `_element`."""
    W: gl.constexpr = k.shape[0]
    N: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2] * WORD
    k = _halves(k, KIND).reshape([W, N, D // (16 * V), 4, 2 * V, 2]).permute((0, 1, 2, 4, 3, 5))
    return gl.convert_layout(k.reshape([W, N, D]), OPERAND)


@gluon.jit
def _element(i, V: gl.constexpr):
    """Which element of a row is the i-th of an operand by `_keys`."""
    return i // (16 * V) * (16 * V) + i // 2 % 4 * (4 * V) + i // 8 % (2 * V) * 2 + i % 2


@gluon.jit
def _value_pairs(words, KIND: gl.constexpr):
    """Words ``[..., 2]`` of two keys as fp16 ``[..., 2, 2: element of the word, 2: key]``."""
    a, b = gl.split(words)
    a, b = gl.inline_asm_elementwise(PAIRS, "=&r,=&r,r,r", [a, b], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return _halves(gl.join(a, b), KIND)


@gluon.jit
def _values(v, KIND: gl.constexpr, V: gl.constexpr, OPERAND: gl.constexpr):
    """Rows as columns of the left operand, whose rows are elements in an order that `_in_order` undoes."""
    W: gl.constexpr = v.shape[0]
    N: gl.constexpr = v.shape[1]
    D: gl.constexpr = v.shape[2] * WORD
    v = _value_pairs(v.reshape([W, N // 2, 2, D // WORD]).permute((0, 1, 3, 2)), KIND)
    v = v.reshape([W, N // 2, D // (32 * V), 8, 4 * V, 2])
    return gl.convert_layout(v.permute((0, 2, 4, 3, 1, 5)).reshape([W, D, N]), OPERAND)


@gluon.constexpr_function
def _sums_layout(W, H, D):
    """[warps, heads, elements]: a thread has all warps' sums, of four elements of a row side by side."""
    rest = [[0, 0, d] for d in _bits(4, D)] + [[0, h, 0] for h in _bits(1, H)]
    warps = 5 + len(_bits(1, W))
    regs = [[w, 0, 0] for w in _bits(1, W)] + [[0, 0, 1], [0, 0, 2]] + rest[warps:]
    return gl.DistributedLinearLayout(regs, rest[:5], rest[5:warps], [], [W, H, D])


@gluon.jit
def _in_order(acc, V: gl.constexpr):
    """``[H, DV]`` of ``[warps, DV, H]`` sums by `_values`: those of all warps, in the order of a row's elements.

    The change of layout comes first: as a reduction over warps, with two columns of the product in a thread, each store
    to shared memory had two to four lanes in a bank."""
    W: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    H: gl.constexpr = acc.shape[2]
    acc = acc.reshape([W, DV // (32 * V), 4 * V, 8, H]).permute((0, 4, 1, 3, 2)).reshape([W, H, DV])
    return gl.sum(gl.convert_layout(acc, _sums_layout(W, H, DV)), 0)


@launch.jit(
    gluon=True,
    do_not_specialize=(
        "kv_indptr", "kv_indices", "lse", "part_lse", "k_scale", "v_scale", "q_row", "q_head", "kc_page",
        "kc_token", "kc_head", "vc_page", "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "bs",
        "programs", "window", "scale", "cap", "qo_indptr", "n",
    ),
)  # fmt: skip
def decode_attention_lanes_kernel(
    q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, part, part_lse, k_scale, v_scale,
    q_row: gl.int64, q_head: gl.int64, kc_page: gl.int64, kc_token: gl.int64, kc_head: gl.int64,
    vc_page: gl.int64, vc_token: gl.int64, vc_head: gl.int64, out_row: gl.int64, out_head: gl.int64,
    num_slots: gl.int64, nnz: gl.int64, bs: gl.int32, programs: gl.int32, window: gl.int32, scale, cap,
    qo_indptr, n: gl.int32,
    Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr,
    SHORTEST: gl.constexpr, FEW_PARTS: gl.constexpr, LONGER: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr,
    PDL: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    W: gl.constexpr = gl.num_warps()
    block = gl.program_id(0) % BLOCKS
    c = gl.program_id(0) // BLOCKS
    few = gl.arange(0, FEW, gl.BlockedLayout([1], [32], [W], [0]))
    many = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [W], [0]))
    LINES: gl.constexpr = Q_HEADS * max(TOKENS, 1)
    if TOKENS:  # noqa: SIM102, what is known when it is compiled stands alone
        if idle(qo_indptr, few, many, c, n, bs, programs, TOKENS):
            note_none(qo_indptr, part_lse, False, c, n, bs, programs, LINES)
            return
    chunk, request, before, c, falls = find_own(
        qo_indptr, kv_indptr, few, many, c, n, nnz, bs, programs, window, SHORTEST, FEW_PARTS, LONGER, WINDOW,
        TOKENS, BLOCK
    )  # fmt: skip
    if TOKENS:
        note_none(qo_indptr, part_lse, falls, c, n, bs, programs, LINES)

    KIND: gl.constexpr = k_cache.dtype.element_ty
    K_WIDE: gl.constexpr = 4
    V_WIDE: gl.constexpr = 4 if DV >= 128 else DV // 32
    K_ROWS: gl.constexpr = _key_layout(W, N, D // WORD, K_WIDE)
    V_ROWS: gl.constexpr = _value_layout(W, N, DV // WORD, V_WIDE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    EACH: gl.constexpr = gl.SliceLayout(1, MMA)
    H: gl.constexpr = COLUMNS
    STEP: gl.constexpr = W * N

    if request < bs:
        if TOKENS:
            tile, begin, low, high, sees = part_of(
                qo_indptr, kv_indptr, request, c, before, falls, n, nnz, chunk, TOKENS, CAUSAL, STEP, window, WINDOW
            )
            note_tile(part_lse, few, tile, c, falls, n, programs, LINES)
            parts = tile[4]
            row = tile[0].to(gl.int64)
            columns = tile[1] * GROUP
        else:
            begin, parts, low, high = keys_of(kv_indptr, request, c, before, nnz, chunk, window, STEP, WINDOW)
            note(part_lse, request, c, before, parts, bs, programs, Q_HEADS)
            row = request.to(gl.int64)
            columns = GROUP
            sees = high
        kv_head = block.to(gl.int64)
        first = kv_head * GROUP

        k_base = k_cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * (kc_head * (UNIT // WORD))
        v_base = v_cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * (vc_head * (UNIT // WORD))
        slots = kv_indices + begin.to(gl.int64)
        slot = _slots(slots, low, high, W, N, K_ROWS)
        v_slot = _slots(slots, low, high, W, N, V_ROWS)
        VP: gl.constexpr = V_PAGE if V_PAGE else K_PAGE  # 0: v lies as k does
        k = _rows(k_base, slot, num_slots, kc_page, kc_token, K_PAGE, UNIT, D // WORD, K_ROWS)
        v = _rows(v_base, v_slot, num_slots, vc_page, vc_token, VP, UNIT, DV // WORD, V_ROWS)
        k_slot = _slots(slots, low + STEP, high, W, N, K_ROWS)
        v_slot = _slots(slots, low + STEP, high, W, N, V_ROWS)

        d = _element(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT))), K_WIDE)[None, :, None]
        h = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
        w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
        at = q + (row * q_row + first * q_head) * UNIT
        x = gl.load(at + row_at(h, q_row, q_head, GROUP, TOKENS) * UNIT + d + w * 0, h < columns, other=0.0)
        by = gl.full([W, H], scale * factor(k_scale, K_KIND), gl.float32, EACH)
        if q.dtype.element_ty != gl.float16:
            e = exponent(gl.max(magnitude(x), 1))
            x = (x.to(gl.float32) * power(e)[:, None, :]).to(gl.float16)
            by = without(by, gl.convert_layout(e, EACH))

        top = gl.full([W, H], float("-inf"), gl.float32, EACH)
        total = gl.zeros([W, N, H], gl.float32, MMA)
        acc = gl.zeros([W, DV, H], gl.float32, MMA)
        for j in range(low, high, STEP):
            s = mma_v2(_keys(k, KIND, K_WIDE, LEFT), x, gl.zeros([W, N, H], gl.float32, MMA))
            ok = gl.convert_layout(_there(slot, num_slots).to(gl.int32), gl.SliceLayout(2, MMA))
            k = _rows(k_base, k_slot, num_slots, kc_page, kc_token, K_PAGE, UNIT, D // WORD, K_ROWS)
            slot = k_slot
            k_slot = _slots(slots, j + 2 * STEP, high, W, N, K_ROWS)
            if CAP:
                s = cap * LOG2E * tanh(s * (by / cap)[:, None, :])
            else:
                s = s * (by * LOG2E)[:, None, :]
            s = gl.where(ok[:, :, None] != 0, s, float("-inf"))
            if TOKENS > 1:
                edge = j + STEP > sees
                if WINDOW:
                    edge = edge | (j < sees + (TOKENS - 2) - window)
                if edge:
                    s = gl.where(_sees(s, j - sees, window, GROUP, TOKENS, WINDOW), s, float("-inf"))
            new = gl.maximum(top, gl.max(s, 1))
            base = gl.where(new == float("-inf"), 0.0, new)
            keep = gl.exp2(top - base)
            p = gl.exp2(s - (base - SHIFT)[:, None, :])
            total = total * keep[:, None, :] + p
            p = gl.convert_layout(p.to(gl.float16), RIGHT)
            acc = mma_v2(_values(v, KIND, V_WIDE, LEFT), p, acc * keep[:, None, :])
            top = new
            v = _rows(v_base, v_slot, num_slots, vc_page, vc_token, VP, UNIT, DV // WORD, V_ROWS)
            v_slot = _slots(slots, j + 2 * STEP, high, W, N, V_ROWS)
        if PDL:
            gdc_launch_dependents()

        best = gl.max(top, 0)
        base = gl.where(best == float("-inf"), 0.0, best)
        keep = gl.exp2(top - base[None, :])
        full = gl.sum(gl.sum(total, 1) * keep, 0)
        acc = _in_order(acc * keep[:, None, :], V_WIDE)
        OUT: gl.constexpr = acc.type.layout
        some = full != 0.0
        full = gl.where(some, full, 1.0)
        acc = acc * gl.convert_layout(factor(v_scale, V_KIND) / full, gl.SliceLayout(1, OUT))[:, None]
        sums = gl.where(some, base - SHIFT + gl.log2(full), float("-inf"))
        d = gl.arange(0, DV, gl.SliceLayout(0, OUT))[None, :]
        h = gl.arange(0, H, gl.SliceLayout(1, OUT))
        there = (h < columns)[:, None]
        one = gl.arange(0, H, gl.SliceLayout(0, EACH))
        if parts == 1:
            to = out + (row * out_row + first * out_head) * UNIT
            to += (row_at(h, out_row, out_head, GROUP, TOKENS) * UNIT)[:, None] + d
            gl.store(to, acc.to(out.dtype.element_ty), there)
            if LSE:
                to = lse + row * Q_HEADS + first + row_at(one, Q_HEADS, 1, GROUP, TOKENS)
                gl.store(to, sums * LN2, one < columns)
        else:
            line = c.to(gl.int64) * LINES + first
            gl.store(part + (line + row_at(h, Q_HEADS, 1, GROUP, TOKENS))[:, None] * DV + d, acc, there)
            gl.store(part_lse + line + row_at(one, Q_HEADS, 1, GROUP, TOKENS), sums, one < columns)
