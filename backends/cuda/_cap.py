# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""tanh of logits under a cap, in Gluon: what is taken to be enough for most logits, and beside it the rest.

Up to `NEAR` it is a polynomial, right to 3.3e-7 of the result in fp32, near 0 too. Where one of four in some thread of
a warp is beyond, exponentials are taken for these as well; how often that is so in a model has not been measured. A
quotient of polynomials, right for all without a branch, took 3 to 9 % more of a prompt's time.

The polynomial: weighted least squares of the relative error over [0, NEAR], which is 2.3e-7.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NEAR = 0.9
POLYNOMIAL = (-0.00373537466, 0.0181163494, -0.0525911525, 0.133103251, -0.333320558)
"""Of y = x^2, times y, and 1: tanh(x) / x."""
TOGETHER = 4
"""Elements side by side, of each of which one instruction waits for the one before."""


def _number(x: float) -> str:
    import struct

    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _text() -> str:
    """PTX: outputs are the first operands, inputs the others."""
    each = range(TOGETHER)
    out, x = [f"${i}" for i in each], [f"${TOGETHER + i}" for i in each]
    lines = [f".reg .f32 y<{TOGETHER}>, a, m;", ".reg .pred far, any;"]
    lines += [f"mul.f32 y{i}, {x[i]}, {x[i]};" for i in each]
    first, *others = POLYNOMIAL
    lines += [f"fma.rn.f32 {out[i]}, y{i}, {_number(first)}, {_number(others[0])};" for i in each]
    for c in (*others[1:], 1.0):
        lines += [f"fma.rn.f32 {out[i]}, {out[i]}, y{i}, {_number(c)};" for i in each]
    lines += [f"mul.f32 {out[i]}, {out[i]}, {x[i]};" for i in each]
    lines += [f"abs.f32 m, {x[0]};"]
    for i in each[1:]:
        lines += [f"abs.f32 a, {x[i]};", "max.f32 m, m, a;"]
    lines += [f"setp.gt.f32 far, m, {_number(NEAR)};", "vote.sync.any.pred any, far, 0xffffffff;"]
    lines += ["@!any bra.uni DONE;"]
    for i in each:
        # 1 - 2 / (e^2x + 1)
        lines += [f"abs.f32 a, {x[i]};", f"setp.gt.f32 far, a, {_number(NEAR)};"]
        lines += [f"mul.f32 a, {x[i]}, {_number(2 * 1.4426950408889634)};", "ex2.approx.ftz.f32 a, a;"]
        lines += [f"add.f32 a, a, {_number(1.0)};", "rcp.approx.ftz.f32 a, a;"]
        lines += [f"@far fma.rn.f32 {out[i]}, a, {_number(-2.0)}, {_number(1.0)};"]
    return "{ " + " ".join(lines) + " DONE: }"


TANH = gl.constexpr(_text())
OPERANDS = gl.constexpr(",".join(["=&f"] * TOGETHER + ["f"] * TOGETHER))
MANY = gl.constexpr(TOGETHER)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise(TANH, OPERANDS, [x], dtype=gl.float32, is_pure=True, pack=MANY)
