"""The lane itself: what it takes, what it refuses and in which words, and what it does with the odd cases."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from ascend import kernels, sabotage

from hal import lowered
from hal.lowered import compile as compiler
from hal.lowered import instrument, loops, machine, pins, runtime, toolchain

I32 = torch.int32


# --- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("negate", [False, True])
def test_floats_and_bools(negate: bool) -> None:
    src, dst = torch.randn(13), torch.zeros(13)
    kernels.scale((1,), src, dst, 13, 2.5, negate, BLOCK=16)
    assert torch.equal(dst, src * (-2.5 if negate else 2.5))


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 3])
def test_integers_beyond_int64(value: int) -> None:
    dst = torch.zeros(1, dtype=torch.int64)
    kernels.store_int((1,), dst, value)
    assert int(dst) % 2**64 == value


def test_a_default_is_a_constexpr_too() -> None:
    dst = torch.zeros(8, dtype=I32)
    lowered.run(kernels.defaults.jit, (1,), (dst,), {})
    assert dst.tolist() == list(range(8))


def test_empty_tensors() -> None:
    nothing = torch.zeros(0, dtype=I32)
    kernels.from_nothing((4,), nothing, nothing, 0, BLOCK=16)


def test_tensors_on_a_device_are_refused() -> None:
    t = torch.zeros(37, dtype=I32)
    with pytest.raises(lowered.LoweredError, match=r"src is on meta; the lowered lane runs on CPU tensors"):
        sabotage.copy_block((1,), t.to("meta"), t, 16, BLOCK=16)


@pytest.mark.parametrize(
    ("args", "constexprs", "said"),
    [
        ((1, 2), {"BLOCK": 16}, "no argument for parameter n"),
        ((1, 2, 3), {}, "no value for constexpr BLOCK"),
        ((1, 2, 3, 4), {"BLOCK": 16}, "too much given: 1 arguments"),
        ((1, 2, 3), {"BLOCK": 16, "STEP": 2}, r"too much given: \['STEP'\]"),
        ((1, "x", 3), {"BLOCK": 16}, "parameter dst: a tensor, int, float, bool or None; got str"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], constexprs: dict[str, int], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        lowered.lower(sabotage.copy_block.jit, args, constexprs)


def test_a_kernel_is_not_run_with_other_arguments_than_it_was_lowered_for() -> None:
    t = torch.zeros(16, dtype=I32)
    form = lowered.lower(sabotage.copy_block.jit, (t, t.clone(), 16), {"BLOCK": 16})
    fewer = dataclasses.replace(form, args=form.args[:1], types=form.types[:1], key=form.key + "x")
    with pytest.raises(lowered.LoweredError, match=r"15 words for \d+ parameters"):
        machine.launch(fewer, (1,), (t,), frozenset())


# --- memory ---------------------------------------------------------------------------------------------


def test_atomics_are_told_as_races() -> None:
    """The linalg of an atomic is a plain read, sum and write: two programs that meet there can't be excused."""
    dst = torch.zeros(16, dtype=I32)
    kernels.count_up((1,), dst, 16, BLOCK=16)
    assert dst.tolist() == [1] * 16
    with pytest.raises(lowered.RaceError, match="program \\(1, 0, 0\\) would read what program \\(0, 0, 0\\)"):
        kernels.count_up((5,), dst, 16, BLOCK=16)
    with pytest.raises(lowered.AccessError, match="past the end of dst"):
        kernels.count_up((1,), dst[:9], 9, BLOCK=16)


def test_a_pointer_that_is_no_arguments() -> None:
    src, dst = torch.zeros(4, dtype=I32), torch.zeros(4, dtype=I32)
    with pytest.raises(lowered.AccessError, match="through a pointer that is no argument's") as caught:
        kernels.far_away((1,), src, dst, 2**52)
    assert caught.value.argument is None


def test_a_program_that_takes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ARENA_BYTES", 1 << 14)
    t = torch.zeros(8192, dtype=I32)
    with pytest.raises(lowered.LoweredError, match="its buffers exceed 16384 bytes"):
        kernels.big((1,), t, t.clone(), BLOCK=8192)


def test_gaps_that_can_be_named() -> None:
    t = torch.zeros(4, 6, 8, dtype=I32)
    assert machine._gaps(t) == ([], 0)
    assert machine._gaps(t[:, :, :5]) == ([(4, 192), (6, 32)], 20)
    assert machine._gaps(t[:, :3]) == ([(4, 192)], 96)
    # Rows that overlap, and more dims than an entry holds: every byte of the extent counts as the tensor's.
    assert machine._gaps(torch.zeros(40, dtype=I32).as_strided((5, 8), (4, 1))) == ([], 0)
    assert machine._gaps(torch.zeros(3, 3, 3, 3, 3, 3, dtype=I32)[::2, ::2, ::2, ::2, ::2, ::2]) == ([], 0)


def test_a_race_inside_one_line_of_memory() -> None:
    """What several programs have touched is known by the byte."""
    dst = torch.zeros(4, dtype=I32)
    kernels.meet((4,), dst, 9)
    assert dst.tolist() == [0, 1, 2, 3]
    with pytest.raises(lowered.RaceError) as caught:
        kernels.meet((4,), dst, 3)
    assert (caught.value.program, caught.value.other, caught.value.offset) == ((3, 0, 0), (0, 0, 0), 0)


@pytest.mark.parametrize("kept", [machine.KEPT_BYTES, 0])
def test_a_write_after_many_reads_is_a_race(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the memory of the trace is given back between launches; and no launch hears of the one before."""
    monkeypatch.setattr(machine, "KEPT_BYTES", kept)
    src, dst = torch.arange(40, dtype=I32), torch.zeros(192, dtype=I32)
    for _ in range(2):
        kernels.read_all((3,), src, dst, 40, 9, BLOCK=64)
        assert torch.equal(dst.view(3, 64)[:, :40], src.expand(3, 40))
        with pytest.raises(lowered.RaceError, match="would write what several programs have read") as caught:
            kernels.read_all((3,), src, dst, 40, 2, BLOCK=64)
        assert caught.value.offset == 0
    # One program alone may do both.
    kernels.read_all((1,), src, dst, 40, 0, BLOCK=64)


# --- loops over whole buffers -------------------------------------------------------------------------------


LOOP = """module {
  linalg.generic {a} ins(%a, %b, %a : memref<4xf32>, memref<?xf32>, memref<4xf32>) outs(%c : TYPE) {
}"""


def test_plain_buffers_are_pinned() -> None:
    text = pins.pin(LOOP.replace("TYPE", "memref<2x2xi1>"))
    assert "ins(%hal.pin1_0, %b, %hal.pin1_0 : memref<4xf32>, memref<?xf32>, memref<4xf32>)" in text
    assert "outs(%hal.pin1_1 : memref<2x2xi1>)" in text
    assert "%hal.pin1_1 = func.call @hal_pin_4_2x2xi1(%c) : (memref<2x2xi1>) -> memref<2x2xi1>" in text
    strided = pins.pin(LOOP.replace("TYPE", "memref<2x2xf32, strided<[4, 1]>>"))
    assert "outs(%c : memref<2x2xf32, strided<[4, 1]>>)" in strided


SHARED = """%1 = arith.extf %0 : tensor<4xbf16> to tensor<4xf32>
%2 = linalg.broadcast ins(%1 : tensor<4xf32>) outs(%9 : tensor<2x4xf32>) dimensions = [0]
%3 = arith.mulf %2, %2 : tensor<2x4xf32>
%2 = arith.addf %3, %3 : tensor<2x4xf32>
%4 = arith.addf %2, %2 : tensor<2x4xf32>"""


def test_what_is_cheap_is_made_again_for_each_use() -> None:
    """With all that it is made of; another value of the same name, of another scope, is not."""
    assert loops.apart(SHARED).splitlines() == [
        "%1 = arith.extf %0 : tensor<4xbf16> to tensor<4xf32>",
        "%again1_1 = arith.extf %0 : tensor<4xbf16> to tensor<4xf32>",
        SHARED.splitlines()[1],
        "%again1_2 = linalg.broadcast ins(%again1_1 : tensor<4xf32>) outs(%9 : tensor<2x4xf32>) dimensions = [0]",
        "%3 = arith.mulf %2, %again1_2 : tensor<2x4xf32>",
        *SHARED.splitlines()[3:],
    ]


PRODUCT = """#map = affine_map<(d0, d1, d2) -> (d0, d2)>
#map1 = affine_map<(d0, d1, d2) -> ORDER>
#map2 = affine_map<(d0, d1, d2) -> (d0, d1)>
linalg.generic {indexing_maps = [#map, #map1, #map2], iterator_types = ["parallel", "parallel", "reduction"]} ins()
%2 = BODY
%3 = arith.addf %out, %2 : f32
linalg.yield %3 : f32"""


@pytest.mark.parametrize(
    ("order", "dims", "kinds"),
    [
        ("(d2, d1)", "(d0, d2, d1)", '"parallel", "reduction", "parallel"'),
        ("(d1, d2)", "(d0, d1, d2)", '"parallel", "parallel", "reduction"'),
    ],
)
def test_the_innermost_loop_of_a_product_is_over_what_lies_together(order: str, dims: str, kinds: str) -> None:
    lines = loops.order_loops(PRODUCT.replace("ORDER", order)).splitlines()
    said = ", ".join(f"affine_map<{dims} -> {results}>" for results in ("(d0, d2)", order, "(d0, d1)"))
    assert lines[3] == f"linalg.generic {{indexing_maps = [{said}], iterator_types = [{kinds}]}} ins()"
    assert lines[5] == "%3 = arith.addf %out, %2 fastmath<reassoc> : f32"
    indexed = PRODUCT.replace("BODY", "linalg.index 1 : index")
    assert loops.order_loops(indexed).splitlines()[3] == PRODUCT.splitlines()[3]


@pytest.mark.parametrize("own", [True, False])
def test_a_loop_over_what_is_no_buffer_is_an_error(own: bool) -> None:
    kind = "{ ptr, ptr, i64, [1 x i64], [1 x i64] }"
    words = ", ".join([*(f"i64 %w{i}" for i in range(10)), "ptr %x, ptr %same, i64 %o, i64 %n, i64 %s"])
    at = "%buffer" if own else "%x"
    llvm = f"""define void @k({words}, {", ".join(f"i32 %g{i}" for i in range(6))}) {{
  %buffer = call ptr @malloc(i64 16)
  %pinned = call {kind} @hal_pin_16_4xf32(ptr {at}, ptr {at}, i64 0, i64 4, i64 1)
  %start = extractvalue {kind} %pinned, 1
  %last = getelementptr float, ptr %start, i64 3
  store float 2.5, ptr %last, align 4
  %found = load float, ptr %last, align 4
  store float %found, ptr %x, align 4
  ret void
}}
declare ptr @malloc(i64)
declare {kind} @hal_pin_16_4xf32(ptr, ptr, i64, i64, i64)
"""
    form = lowered.Lowered("k", ("x",), ("*fp32",), {}, "", llvm, f"pinned {own}")
    x = torch.zeros(4)
    if own:
        machine.launch(form, (1,), (x,), frozenset())
        assert x.tolist() == [2.5, 0, 0, 0]
    else:
        with pytest.raises(lowered.LoweredError, match="a loop over 16 bytes that are none of its buffers"):
            machine.launch(form, (1,), (x,), frozenset())
        assert not x.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00018000, 0x7F800001, -0x7FFFFFFF - 1])
    src = bits.to(torch.int32).view(torch.float32).to(dtype)
    dst = torch.zeros(7, dtype=torch.bfloat16 if dtype == torch.float32 else torch.float32)
    sabotage.overlapping((1,), src, dst, 7, BLOCK=8)
    assert torch.equal(dst.nan_to_num(3.0), src.to(dst.dtype).nan_to_num(3.0))
    assert dst.isnan().tolist() == src.isnan().tolist()


# --- IR that the lane does not know -----------------------------------------------------------------------


KERNEL = "define void @k(ptr %0, i32 %1, i32 %2, i32 %3, i32 %4, i32 %5, i32 %6) {{\n  {line}\n  ret void\n}}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%7 = load <4 x i32>, ptr %0, align 16", "an access of type <4 x i32>"),
        ("%7 = load atomic i32, ptr %0 monotonic, align 4", "an access of type atomic i32"),
        ("store i32 1, ptr addrspace(1) %0", "an access in a form that is not known"),
        ("%7 = atomicrmw add ptr %0, i32 1 seq_cst", "an access in a form that is not known"),
    ],
)
def test_an_access_that_is_not_known_is_not_let_through(line: str, said: str) -> None:
    with pytest.raises(lowered.LoweringError, match=said) as caught:
        instrument.instrument(KERNEL.format(line=line), traced=True)
    assert caught.value.kernel == "k"
    assert "hal: kernel k: instrumentation failed" in str(caught.value)


def test_a_stack_slot_is_the_programs_own() -> None:
    line = "%7 = alloca i32\n  store i32 1, ptr %7, align 4\n  %8 = load i32, ptr %7, align 4"
    text = instrument.instrument(KERNEL.format(line=line), traced=True)
    assert "store i32 1, ptr %7, align 4" in text
    assert "%8 = load i32, ptr %7, align 4" in text


@pytest.mark.parametrize("names", [(), ("one", "two")])
def test_one_kernel_in_the_ir(names: tuple[str, ...]) -> None:
    with pytest.raises(lowered.LoweringError, match=f"{len(names)} functions in the IR, expected 1"):
        instrument.params("".join(f"define void @{n}(ptr %0) {{\n" for n in names))


def test_an_access_that_is_inside_its_buffer_costs_nothing() -> None:
    """LLVM leaves the check of a block's loop away, and keeps that of an index it can't know."""
    body = """%buffer = call ptr @malloc(i64 {size})
  br label %loop
loop:
  %i = phi i64 [ 0, %7 ], [ %next, %body ]
  %more = icmp slt i64 %i, 16
  br i1 %more, label %body, label %end
body:
  %at = getelementptr i32, ptr %buffer, i64 %i
  store i32 1, ptr %at, align 4
  %next = add i64 %i, 1
  br label %loop
end:
  call void @free(ptr %buffer)"""
    form = lowered.Lowered("k", (), (), {}, "", "", "")
    for size, checked in ((64, False), (60, True)):
        text = KERNEL.format(line=body.format(size=size)) + "declare ptr @malloc(i64)\ndeclare void @free(ptr)\n"
        code = machine._machine_code(dataclasses.replace(form, llvm=text), True, machine._target())
        assert (b"hal_check" in code) == checked


def test_ir_that_llvm_refuses() -> None:
    t = torch.zeros(16, dtype=I32)
    form = lowered.lower(sabotage.copy_block.jit, (t, t.clone(), 16), {"BLOCK": 16})
    broken = dataclasses.replace(form, llvm=KERNEL.format(line="%7 = add i32 %nothing, 1"), key=form.key + "y")
    with pytest.raises(lowered.LoweringError, match="LLVM failed"):
        machine.launch(broken, (1,), (t, t.clone(), 16), frozenset())


# --- the compiler's answers -------------------------------------------------------------------------------


def test_buffers_are_read_with_their_strides() -> None:
    module = """
    "UB_SIZE", 1572864
    %c0 = arith.constant 0 : i64
    %c64_i64 = arith.constant 64 : i64
    %1 = hivm.hir.pointer_cast(%c0) : memref<4x8xf32, strided<[16, 1]>, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c0, %c64_i64) : memref<16xi32, #hivm.address_space<ub>>
    """
    # Four rows of 8, each 16 after the last: 56 floats reach further than 64 bytes and 16 ints.
    assert compiler.buffers(module) == (56 * 32, 1572864)
    with pytest.raises(ValueError, match="a buffer of unknown size"):
        compiler.buffers("hivm.hir.pointer_cast(%c0) : memref<?xf32, #hivm.address_space<ub>>")


def test_a_hivmc_that_fails_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "hivmc"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "hivmc 1.0" && exit 0\necho "error: no" >&2; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    t = torch.zeros(16, dtype=I32)
    form = lowered.lower(sabotage.copy_block.jit, (t, t.clone(), 16), {"BLOCK": 16})
    got = compiler.compile_for(form.ttadapter, "Ascend910B3")
    assert got.reason
    assert not got.binary
    assert got.ub_share == 0.0


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lowered.ToolchainError, match="ascendnpu-ir has no bishengir-nothing"):
        toolchain.bishengir("bishengir-nothing")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(lowered.ToolchainError, match="ascendnpuir is not importable"):
        toolchain.bishengir.__wrapped__("bishengir-opt")


def test_no_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert toolchain.missing() == toolchain.NO_C_COMPILER
    with pytest.raises(lowered.ToolchainError, match="install gcc or clang, or name one in CC"):
        runtime._library()


def test_a_c_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    with pytest.raises(lowered.ToolchainError, match="the lowered lane can't run: false failed"):
        runtime._library()


def test_the_runtime_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    runtime._library()
    (kept,) = tmp_path.rglob("*.so")
    before = kept.stat().st_mtime_ns
    assert runtime._library()._name == str(kept)
    assert kept.stat().st_mtime_ns == before
