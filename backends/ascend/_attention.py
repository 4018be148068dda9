"""What the two attention kernels share: the running softmax of a tile of query rows over listed slots.

A slot is a scalar, its rows of k and v contiguous copies, and one pass over them keeps a running maximum and sum, all
in fp32 on the vector unit: rows whose places only the program knows can't be a cube's operand without a copy an
element.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from hal.backends.ascend._device import TILE_BYTES, pow2


@triton.jit
def _tanh(x):
    """By its series near 0, where the other form loses all its digits."""
    y = tl.abs(x)
    e = tl.exp(-2.0 * y)
    far = (1.0 - e) / (1.0 + e)
    z = x * x
    near = y * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    found = tl.where(y < 0.3, near, far)
    return tl.where(x < 0.0, -found, found)


@triton.jit
def over(
    x, k_base, v_base, indices, start, end, num_slots, page, kc_page, kc_token, vc_page, vc_token, cap,
    t, own, window, ROWS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, B_K: tl.constexpr,
    B_V: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) of the rows x ``[ROWS, B_K]``, fp32 and scaled, over the entries [start, end).

    Row r is of token ``t[r]``, a whole fp32 number below ROWS, whose own entry is ``own + t[r]``: with CAUSAL it sees
    no entry after it, with WINDOW none more than `window` before it.
    """
    column_k = tl.arange(0, B_K)
    column_v = tl.arange(0, B_V)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, B_V], 0.0, tl.float32)
    for j in range(start, end):
        slot = tl.load(indices + j).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            kc = k_base + (slot // page) * kc_page + (slot % page) * kc_token
            vc = v_base + (slot // page) * vc_page + (slot % page) * vc_token
            k = tl.load(kc + column_k, mask=column_k < K_DIM, other=0.0).to(tl.float32)
            v = tl.load(vc + column_v, mask=column_v < V_DIM, other=0.0).to(tl.float32)
            logit = tl.sum(x * k[None, :], 1)
            if CAP:
                logit = cap * _tanh(logit / cap)
            # Beyond a tile's tokens the distance does not matter: within them it is exact in fp32.
            if CAUSAL:
                after = tl.minimum(tl.maximum(j - own, -1), ROWS).to(tl.float32)
                logit = tl.where(t >= after, logit, float("-inf"))
            if WINDOW:
                before = tl.minimum(tl.maximum(j - own + window, -1), ROWS).to(tl.float32)
                logit = tl.where(t <= before, logit, float("-inf"))
            new = tl.maximum(top, logit)
            base = new
            if CAUSAL or WINDOW:
                # A row that has seen nothing yet: -inf less -inf is NaN.
                base = tl.where(new > float("-inf"), new, 0.0)
            keep = tl.exp(top - base)
            p = tl.exp(logit - base)
            total = total * keep + p
            acc = acc * keep[:, None] + p[:, None] * v[None, :]
            top = new
    return acc, top, total


def rows(b_k: int, b_v: int) -> int:
    """Query rows of a tile: what is kept of both halves, in fp32, takes 24 KiB. At most 64, since what is one number a
    row takes 32 bytes.
    """
    return max(1, min(64, pow2(TILE_BYTES * 3 // 8 // (b_k + b_v) + 1) // 2))
