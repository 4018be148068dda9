"""The helper's key, and what it starts: always what Triton would."""

import ctypes
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from launch.rig import BASE, EMPTY, Driver, Rig, floats, helper, plain, typed
from triton import knobs

from hal.triton import launch

__all__ = ["helper"]

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
)
TENSORS = st.builds(
    lambda offset, dtype: BASE[offset : offset + 64].view(dtype),
    st.sampled_from([0, 8, 16, 24, 512]),
    st.sampled_from(DTYPES),
)
SMALL = (0, 1, 2, 15, 16, 17, 32, -1, -16)
EDGES = (2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 16)
INTS = st.one_of(st.sampled_from(SMALL + EDGES), st.integers(-(2**63), 2**64 - 1))
ANY = st.one_of(INTS, st.booleans(), st.floats(width=32), st.none(), TENSORS)


def passed(value: Any, code: str) -> bytes | None:
    """How the driver must get it."""
    if code == "-":
        return None
    if isinstance(value, torch.Tensor):
        return value.data_ptr().to_bytes(8, "little")
    if code in "fd":
        return bytes((ctypes.c_float if code == "f" else ctypes.c_double)(float(value)))
    if code == "b":
        return bytes([value])
    return (value % 2**64).to_bytes(8, "little")[: 4 if code == "i" else 8]


@settings(max_examples=150, deadline=None)
@given(
    frozen=st.sets(st.sampled_from(["a", "b", "n", "m"])),
    calls=st.lists(st.tuples(TENSORS, TENSORS, ANY, ANY), min_size=1, max_size=6),
)
def test_what_is_started_is_what_triton_would_start(
    helper: Any, frozen: set[str], calls: list[tuple[Any, ...]]
) -> None:
    rig = Rig(helper, plain, tuple(frozen))
    for args in calls:
        rig(*args)
    rig.slow_calls.clear()
    rig.driver.started.clear()
    for args in calls:
        assert rig(*args) is None
        key, codes = rig.compiled_for(args)
        ((function, config, values),) = rig.driver.started
        rig.driver.started.clear()
        assert function == rig.functions[key]
        assert config == (3, 2, 1, 128, 96, 1)
        want = [w for w in map(passed, args, codes) if w is not None]
        assert [v[: len(w)] for v, w in zip(values, want, strict=True)] == want
    assert rig.slow_calls == []


FAR = 2**31 + 5
WIDTHS = [(BASE, BASE, n, 5) for n in (3, 2**31 - 1, FAR, 2**63 + 5, 7, -(2**31), -FAR)]


@pytest.mark.parametrize(
    ("fn", "frozen", "calls", "binaries"),
    [
        (plain, (), [(BASE[n:], BASE, 5, 5) for n in (0, 2, 16, 4)], [0, 1, 0, 1]),
        (plain, (), [(BASE[8:], BASE, 5, 5), (BASE, BASE[8:], 5, 5)], [0, 1]),
        (plain, (), [(BASE, BASE, n, 5) for n in (1, True, 1.0, None, 0, False, 0.0)], [0, 1, 2, 3, 4, 1, 2]),
        # The width goes by value even where it is not specialised; -(2**31) is divisible by 16.
        (plain, ("n", "m"), WIDTHS, [0, 0, 1, 2, 0, 0, 1]),
        (plain, (), WIDTHS, [0, 0, 1, 2, 0, 3, 1]),
        (typed, ("a", "n", "x"), [(BASE, n, 4) for n in (1, 16, 5, 2**31 + 1, -1)], [0, 0, 0, 0, 0]),
    ],
    ids=["alignment", "which pointer", "kinds", "frozen width", "width", "annotated"],
)
def test_which_arguments_share_a_binary(
    helper: Any, fn: Any, frozen: tuple[str, ...], calls: list[tuple[Any, ...]], binaries: list[int]
) -> None:
    rig = Rig(helper, fn, frozen)
    for args in calls:
        rig(*args)
    assert len(rig.slow_calls) == len(set(binaries))
    rig.driver.started.clear()
    for args in calls:
        assert rig(*args) is None
    assert [function - 1 for function, _, _ in rig.driver.started] == binaries


def test_an_annotated_integer_out_of_its_range_is_left_to_the_slow_path(helper: Any) -> None:
    rig = Rig(helper, typed)
    rig(BASE, 2**40, 5)
    assert rig(BASE, 2**40, 7) is None
    assert rig(BASE, 2**40, 2**31 + 1) == "slow"


@pytest.mark.parametrize("what", ["hook", "other hook", "debug", "instrumentation", "pre-run", "global", "device"])
def test_what_disturbs_goes_the_slow_way(helper: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    rig = Rig(helper)
    args = (BASE, BASE, 5, 6)
    rig(*args)
    assert rig(*args) is None
    if what == "hook":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    elif what == "other hook":
        monkeypatch.setattr(knobs.runtime, "launch_exit_hook", type(knobs.runtime.launch_exit_hook)())
    elif what == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif what == "instrumentation":
        monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")
    elif what == "pre-run":
        rig.pre_run.append(print)
    elif what == "global":
        rig.space["WIDTH"] = 4
    else:
        rig.driver.device = 1
    started = len(rig.driver.started)
    assert rig(*args) == "slow"
    assert len(rig.driver.started) == started


def test_a_tensor_of_another_class_goes_the_slow_way(helper: Any) -> None:
    class Mine(torch.Tensor):
        pass

    rig = Rig(helper)
    rig(BASE, BASE, 5, 6)
    assert rig(BASE.as_subclass(Mine), BASE, 5, 6) == "slow"
    assert rig(torch.nn.Parameter(BASE.view(torch.float32)), BASE, 5, 6) == "slow"
    assert rig(torch.nn.Parameter(BASE.view(torch.float32)), BASE, 5, 6) is None


def test_grids_empty_grids_and_errors_of_the_driver(helper: Any) -> None:
    rig = Rig(helper)
    args = (BASE, BASE, 5, 6)
    rig(*args)
    for grid, whole in (((7,), (7, 1, 1)), ((7, 8), (7, 8, 1))):
        assert rig(*args, grid=grid) is None
        assert rig.driver.started[-1][1][:3] == whole
    count = len(rig.driver.started)
    assert rig(*args, grid=(0, 1, 1)) is None
    assert len(rig.driver.started) == count
    rig.driver.code = 719
    with pytest.raises(RuntimeError, match="719"):
        rig(*args)


def test_errors_of_the_slow_path_come_through(helper: Any) -> None:
    def refuse(*args: Any) -> None:
        raise KeyError("slow")

    rig = Rig(helper)
    native = helper.Launch(refuse, bytes(4), [], ())
    with pytest.raises(KeyError, match="slow"):
        native((1,), BASE, BASE, 5, 6)
    with pytest.raises(KeyError, match="slow"):
        native((1,), BASE)
    del rig


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 16, -1, 2**31, 2**53 + 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(-(2**63), 2**64 - 1),
    st.booleans(),
    st.floats(width=32),
)


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(
        st.tuples(NUMBERS, NUMBERS, st.integers(-(2**63), 2**63 - 1) | st.booleans()), min_size=1, max_size=5
    )
)
def test_numbers_of_every_kind_reach_a_float_parameter_as_what_they_are(
    helper: Any, calls: list[tuple[Any, ...]]
) -> None:
    """A uint64 parameter takes what Triton's own launcher takes: the lowest 64 bits."""
    rig = Rig(helper, floats)
    for args in calls:
        rig(BASE, *args)
    rig.slow_calls.clear()
    rig.driver.started.clear()
    for args in calls:
        assert rig(BASE, *args) is None
        (_, _, values) = rig.driver.started.pop()
        want = [passed(a, c) for a, c in zip((BASE, *args), "pfdl", strict=True)]
        assert [v[: len(w)] for v, w in zip(values, want, strict=True) if w is not None] == want
    assert rig.slow_calls == []


def test_a_form_that_would_read_another_kind_s_bits_is_not_learnt(helper: Any) -> None:
    rig = Rig(helper)
    native = helper.Launch(lambda *_: "slow", bytes(4), [], ())
    for args, codes in (
        ((BASE, BASE, 5, 0.5), "ppil"),
        ((BASE, BASE, 0.5, 5), "pplb"),
        ((BASE, 7, 5, 6), "ppii"),
        ((BASE, BASE, BASE, 6), "ppli"),
        ((BASE, BASE, None, 6), "ppii"),
        ((BASE, BASE, 5, 6), "ppi?"),
    ):
        assert native.add(args, 1, 4, 0, False, codes) is False
        assert native((1,), *args) == "slow"
    assert native.add((BASE, BASE, 5, 6), 1, 4, 0, False, "ppil") is True
    for codes in ("ppi", "ppill", ""):
        with pytest.raises(TypeError, match="4 arguments"):
            native.add((BASE, BASE, 5, 6), 1, 4, 0, False, codes)
    with pytest.raises(TypeError, match="a tuple of ten integers; got list"):
        native.add((BASE, BASE, 5, 6), 1, 4, 0, False, "ppil", ([0] * 10,))
    with pytest.raises(ValueError, match="at most 2 maps expected, got 3"):
        native.add((BASE, BASE, 5, 6), 1, 4, 0, False, "ppil", ((0,) * 10,) * 3)
    del rig


def test_integers_that_no_parameter_holds_go_the_slow_way(helper: Any) -> None:
    rig = Rig(helper)
    native = helper.Launch(lambda *_: "slow", bytes(4), [], ())
    for n in (2**64, -(2**63) - 1, 10**400, -(10**400)):
        assert native((1,), BASE, BASE, n, 6) == "slow"
        assert native.add((BASE, BASE, n, 6), 1, 4, 0, False, "ppll") is False
        assert native((n,), BASE, BASE, 5, 6) == "slow"
    del rig


def rows_of(cache, rows: tl.int64, stride: tl.int64, n, map, UNIT: tl.constexpr, BOXES: tl.constexpr):
    pass


ROWS = launch.Map("map", of="cache", rows="rows", stride="stride", unit="UNIT", columns=576, box=(64, 64), when="BOXES")
CODES, FORM = "plli", (0, 1, 2, 9, 3, 16, 8, 576, 64, 32)


class Maps(Driver):
    """Writes down what it is asked to encode, and what a launch is handed behind its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_of: list[tuple[Any, ...]] = []
        self.handed: list[tuple[Any, ...]] = []
        self.refuses = 0
        self.maps = 1
        u32, u64 = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)
        self.encoder = ctypes.CFUNCTYPE(
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
            *(u64, u64, u32, u32, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        )(self.encode)

    def encode(self, to: int, kind: int, rank: int, base: int, *told: Any) -> int:
        sizes, strides, box, steps, *rest = told
        assert to % 64 == 0, "the driver wants maps at multiples of 64 bytes"
        self.asked_of.append((kind, rank, base, sizes[:2], strides[0], box[:2], steps[:2], *rest))
        ctypes.memset(to, 0xA5, 128)
        return self.refuses

    def start(self, config: Any, function: int, params: Any, extra: Any) -> int:
        i32, i64 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int64)
        for i in range(4, 4 + 5 * self.maps, 5):
            rows, columns, stride = (ctypes.cast(params[i + n], t)[0] for n, t in ((1, i32), (2, i32), (3, i64)))
            self.handed.append((ctypes.string_at(params[i], 128), rows, columns, stride))
        return super().start(config, function, params, extra)


@pytest.fixture
def maps(helper: Any) -> Any:
    driver = Maps()
    encoder = ctypes.cast(driver.encoder, ctypes.c_void_p).value
    helper.drive(1, *driver.addresses(), knobs.runtime, knobs.compilation, EMPTY, encoder)
    driver.count = 4
    return driver


def mapped(helper: Any, *forms: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """(a launch that knows one form, with maps; the calls that it did not start)."""
    kernel, slow = launch.Kernel(rows_of, ("rows", "stride"), False, (ROWS,)), []
    params = bytes(1 * p.specialize + 2 * p.typed for p in kernel.params if not p.constexpr)
    native = helper.Launch(lambda grid, *args: slow.append(args), params, [], ())
    native.add((BASE, 100, 72, 3), 7, 4, 0, False, CODES, forms or (FORM,))
    return native, slow


def test_a_map_is_made_of_the_arguments_that_it_is_of(helper: Any, maps: Any) -> None:
    native, slow = mapped(helper)
    native((2,), BASE, 100, 72, 3)
    # cuda.h: bf16 (9), two dims, columns first; rows 72 * 16 bytes apart; the whole of each box, swizzled by 128 bytes,
    # through L2 by 128 bytes, zeros past the end.
    assert maps.asked_of == [(9, 2, BASE.data_ptr(), [576, 100], 72 * 16, [64, 32], [1, 1], 0, 3, 2, 0)]
    assert maps.handed == [(b"\xa5" * 128, 100, 576, 72)]
    assert not slow
    assert len(maps.started) == 1


def test_a_second_map_follows_the_first_and_may_have_all_that_lies_between_rows(helper: Any, maps: Any) -> None:
    maps.maps = 2
    native, slow = mapped(helper, FORM, (*FORM[:7], 0, 64, 128))
    native((2,), BASE, 100, 80, 3)
    same = 9, 2, BASE.data_ptr()
    rest = [1, 1], 0, 3, 2, 0
    assert maps.asked_of == [
        (*same, [576, 100], 80 * 16, [64, 32], *rest),
        (*same, [80 * 8, 100], 80 * 16, [64, 128], *rest),
    ]
    assert maps.handed == [(b"\xa5" * 128, 100, 576, 80), (b"\xa5" * 128, 100, 640, 80)]
    assert not slow


def test_of_no_rows_there_is_no_map(helper: Any, maps: Any) -> None:
    native, slow = mapped(helper)
    native((2,), BASE, 0, 72, 3)
    assert maps.handed == [(bytes(128), 0, 576, 72)]
    assert not maps.asked_of
    assert not slow


def test_where_the_driver_makes_no_map_triton_says_why(helper: Any, maps: Any) -> None:
    maps.refuses = 1
    native, slow = mapped(helper)
    native((2,), BASE, 100, 72, 3)
    assert [args[1:] for args in slow] == [(100, 72, 3)]
    assert not maps.started


@pytest.mark.parametrize(
    "form", [(1, 1, 2, *FORM[3:]), (0, 4, 2, *FORM[3:]), (0, 1, 3, *FORM[3:]), (0, -1, 2, *FORM[3:])]
)
def test_a_map_of_what_it_can_not_be_of_is_not_learnt(helper: Any, maps: Any, form: tuple[int, ...]) -> None:
    native, slow = mapped(helper, form)
    native((2,), BASE, 100, 72, 3)
    assert len(slow) == 1
    assert not maps.started


def test_without_the_driver_s_encoder_no_map_is_learnt(helper: Any) -> None:
    driver = Driver()
    helper.drive(1, *driver.addresses(), knobs.runtime, knobs.compilation, EMPTY)
    native, slow = mapped(helper)
    native((2,), BASE, 100, 72, 3)
    assert len(slow) == 1
    assert not driver.started


def test_triton_gets_what_a_map_is_made_of_or_none() -> None:
    from triton.experimental.gluon import language as gl

    kernel = launch.Kernel(rows_of, (), False, (ROWS,))
    assert [p.name for p in kernel.params] == ["cache", "rows", "stride", "n", "UNIT", "BOXES"]
    cache, args = torch.zeros(100 * 576, dtype=torch.bfloat16), (100, 72, 3)
    *same, made = kernel.bind(UNIT=8, BOXES=True).given((cache, *args))
    assert same[1:] == list(args)
    assert made.base is cache
    assert (made.shape, made.strides, made.block_shape) == ([100, 576], [576, 1], [64, 64])
    assert made.layout == gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    assert kernel.bind(UNIT=8, BOXES=False).given((cache, *args)) == (cache, *args, None)
    none = kernel.bind(UNIT=8, BOXES=True).given((cache[:0], 0, 72, 3))
    assert none[-1].shape == [1, 576]
    assert none[-1].base.dtype == torch.bfloat16
