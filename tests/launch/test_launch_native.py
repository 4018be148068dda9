"""The launcher's helper in C, without a device: CPU tensors, and a driver that only writes down what it is told."""

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
import torch

pytest.importorskip("triton.knobs", reason="the helper serves the Triton which has `knobs`")

import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from hal.triton import launch

if os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("HAL_LANE"):
    pytest.skip("tests the device lane's launcher", allow_module_level=True)
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no DLPack exchange interface", allow_module_level=True)
if shutil.which(os.environ.get("CC", "gcc")) is None and shutil.which("clang") is None:
    pytest.skip("no C compiler", allow_module_level=True)

CPU = 1  # DLPack's number


class Config(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p), ("attrs", ctypes.c_void_p), ("attributes", ctypes.c_uint),
    ]  # fmt: skip


class Driver:
    """cuLaunchKernelEx and cuCtxGetDevice as functions of C."""

    def __init__(self) -> None:
        self.started: list[tuple[int, tuple[int, ...], list[bytes]]] = []
        self.device, self.count, self.code = 0, 0, 0
        start = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )  # fmt: skip
        where = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        self.functions = start(self.start), where(self.where)

    def start(self, config: Any, function: int, params: Any, extra: Any) -> int:
        c = config[0]
        values = [ctypes.string_at(params[i], 8) for i in range(self.count)]
        self.started.append((function, (c.gx, c.gy, c.gz, c.bx, c.shared, c.attributes), values))
        return self.code

    def where(self, out: Any) -> int:
        out[0] = self.device
        return 0

    def addresses(self) -> list[int]:
        return [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.functions]


@pytest.fixture(scope="module")
def helper() -> Any:
    """The helper; `test_launch_sanitized` names another build of it."""
    if path := os.environ.get("LAUNCH_HELPER"):
        found = spec_from_file_location("hal_launch", path)
        assert found is not None
        assert found.loader is not None
        module = module_from_spec(found)
        found.loader.exec_module(module)
        return module
    return launch._built()


def plain(a, b, n, m, BLOCK: tl.constexpr):
    pass


def typed(a, n: tl.int64, x: tl.int32, BLOCK: tl.constexpr):
    pass


def floats(a, x: tl.float32, y: tl.float64, n: tl.uint64, BLOCK: tl.constexpr):
    pass


class Rig:
    """A helper's launch whose slow path knows what Triton would compile, and teaches it."""

    def __init__(self, helper: Any, fn: Any = plain, frozen: tuple[str, ...] = ()) -> None:
        self.driver = Driver()
        helper.setup(
            torch.Tensor.__dlpack_c_exchange_api__, CPU, *self.driver.addresses(), knobs.runtime, knobs.compilation,
            torch.Tensor, torch.nn.Parameter,
        )  # fmt: skip
        self.kernel = launch.Kernel(fn, frozen)
        self.binder = create_function_from_signature(
            self.kernel.jit.signature, self.kernel.jit.params, CUDABackend(GPUTarget("cuda", 90, 32))
        )
        self.params = [p for p in self.kernel.params if not p.constexpr]
        self.functions: dict[str, int] = {}
        self.slow_calls: list[tuple[Any, ...]] = []
        self.pre_run: list[Any] = []
        self.changed: Any = None
        params = bytes(1 * p.specialize + 2 * p.typed for p in self.params)
        self.native = helper.Launch(
            self.slow, params, self.pre_run, lambda used: bool(self.changed and self.changed(used)), [1]
        )

    def compiled_for(self, args: tuple[Any, ...]) -> tuple[str, str]:
        specialization = self.binder(*args, BLOCK=64)[1]
        types = [s[0] for s in specialization[: len(args)]]
        codes = "".join("p" if t.startswith("*") else launch._CODES[t] for t in types)
        return str(specialization), codes

    def slow(self, grid: Any, *args: Any) -> str:
        self.slow_calls.append(args)
        key, codes = self.compiled_for(args)
        self.native.add(args, self.functions.setdefault(key, len(self.functions) + 1), 4, 96, True, codes)
        return "slow"

    def __call__(self, *args: Any, grid: Any = (3, 2, 1)) -> Any:
        _, codes = self.compiled_for(args)
        self.driver.count = sum(c != "-" for c in codes)
        return self.native(grid, *args)


BASE = torch.zeros(1024, dtype=torch.uint8)
while BASE.data_ptr() % 16:
    BASE = BASE[1:]
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.bool,
)  # fmt: skip
TENSORS = st.builds(
    lambda offset, dtype: BASE[offset : offset + 64].view(dtype), st.sampled_from([0, 8, 16, 24, 512]),
    st.sampled_from(DTYPES),
)  # fmt: skip
INTS = st.one_of(
    st.sampled_from([0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1,
                     2**63 - 1, 2**63, 2**64 - 16]),
    st.integers(-(2**63), 2**64 - 1),
)  # fmt: skip
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


def test_an_annotated_integer_out_of_its_range_is_left_to_the_slow_path(helper: Any) -> None:
    rig = Rig(helper, typed)
    rig(BASE, 2**40, 5)
    assert rig(BASE, 2**40, 7) is None
    assert rig(BASE, 2**40, 2**31 + 1) == "slow"


@pytest.mark.parametrize(
    "what", ["hook", "other hook", "debug", "instrumentation", "pre-run", "global", "device"]
)
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
        rig.changed = lambda used: used == [1]
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
    native = helper.Launch(refuse, bytes(4), [], None, [])
    with pytest.raises(KeyError, match="slow"):
        native((1,), BASE, BASE, 5, 6)
    with pytest.raises(KeyError, match="slow"):
        native((1,), BASE)
    del rig


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 16, -1, 2**31, 2**53 + 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(-(2**63), 2**64 - 1), st.booleans(), st.floats(width=32),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(
        st.tuples(NUMBERS, NUMBERS, st.integers(-(2**63), 2**63 - 1) | st.booleans()),
        min_size=1,
        max_size=5,
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
    native = helper.Launch(lambda *_: "slow", bytes(4), [], None, [])
    for args, codes in (
        ((BASE, BASE, 5, 0.5), "ppil"), ((BASE, BASE, 0.5, 5), "pplb"), ((BASE, 7, 5, 6), "ppii"),
        ((BASE, BASE, BASE, 6), "ppli"), ((BASE, BASE, None, 6), "ppii"), ((BASE, BASE, 5, 6), "ppi?"),
    ):  # fmt: skip
        assert native.add(args, 1, 4, 0, False, codes) is False
        assert native((1,), *args) == "slow"
    assert native.add((BASE, BASE, 5, 6), 1, 4, 0, False, "ppil") is True
    for codes in ("ppi", "ppill", ""):
        with pytest.raises(TypeError, match="4 arguments"):
            native.add((BASE, BASE, 5, 6), 1, 4, 0, False, codes)
    del rig


def test_integers_that_no_parameter_holds_go_the_slow_way(helper: Any) -> None:
    rig = Rig(helper)
    native = helper.Launch(lambda *_: "slow", bytes(4), [], None, [])
    for n in (2**64, -(2**63) - 1, 10**400, -(10**400)):
        assert native((1,), BASE, BASE, n, 6) == "slow"
        assert native.add((BASE, BASE, n, 6), 1, 4, 0, False, "ppll") is False
        assert native((n,), BASE, BASE, 5, 6) == "slow"
    del rig


def in_a_child(code: str, *, built: Any) -> str:
    """What `code` prints; a crash there is a failure here. `made(params, ...)` makes a launch of the helper's."""
    start = f"""
import gc, sys
from importlib.util import module_from_spec, spec_from_file_location
found = spec_from_file_location("hal_launch", {built.__file__!r})
helper = module_from_spec(found)
found.loader.exec_module(helper)
"""
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("slow, bytes(65), hooks, changed, used", "ValueError"),
        ("slow, bytes(4), (), changed, used", "TypeError"),
        ("slow, 'text', hooks, changed, used", "TypeError"),
        ("slow, bytes(4), hooks, changed", "TypeError"),
        ("slow, bytes(4), hooks, changed, used, 1", "TypeError"),
        ("slow, bytes(4), hooks, changed, used, name=1", "TypeError"),
    ],
)
def test_a_launch_that_can_t_be_made_keeps_and_drops_no_reference(
    helper: Any, arguments: str, error: str
) -> None:
    told = in_a_child(
        f"""
slow, hooks, changed, used = (lambda *a: 0), [], (lambda x: False), [[]]
before = [sys.getrefcount(x) for x in (slow, hooks, changed, used)]
for _ in range(100):
    try:
        helper.Launch({arguments})
    except Exception as e:
        told = type(e).__name__
gc.collect()
assert [sys.getrefcount(x) for x in (slow, hooks, changed, used)] == before
print(told)
""",
        built=helper,
    )
    assert told == error


def test_a_launch_is_made_once_and_not_called_before(helper: Any) -> None:
    told = in_a_child(
        """
bare = helper.Launch.__new__(helper.Launch)
try:
    bare((1,))
except TypeError:
    print("not callable")
assert bare.add((), 1, 4, 0, False, "") is False
one = helper.Launch(lambda *a: "slow", bytes(2), [], None, [])
for again in (bytes(2), bytes(64)):
    try:
        one.__init__(lambda *a: 0, again, [], None, [])
    except TypeError as e:
        print(e)
print(one((1,), 2, 3))
""",
        built=helper,
    )
    assert told.splitlines() == [
        "not callable",
        "hal: a launch is made once",
        "hal: a launch is made once",
        "slow",
    ]


def test_cycles_through_a_launch_are_collected(helper: Any) -> None:
    told = in_a_child(
        """
import weakref
class Owner:
    def slow(self, *a): pass
gone = []
for _ in range(50):
    owner = Owner()
    owner.native = helper.Launch(owner.slow, bytes(3), [owner], owner.slow, [owner])
    gone.append(weakref.ref(owner))
    del owner
gc.collect()
print(sum(g() is not None for g in gone))
""",
        built=helper,
    )
    assert told == "0"


def test_a_setup_that_fails_changes_nothing(helper: Any) -> None:
    rig = Rig(helper)
    args = (BASE, BASE, 5, 6)
    rig(*args)
    good = [
        torch.Tensor.__dlpack_c_exchange_api__, CPU, *rig.driver.addresses(), knobs.runtime, knobs.compilation,
        torch.Tensor, torch.nn.Parameter,
    ]  # fmt: skip
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    words = (ctypes.c_uint64 * 8)(9)  # of version 9
    newer = capsule(ctypes.addressof(words), b"dlpack_exchange_api", None)
    for at, bad in ((0, object()), (0, newer), (4, object()), (1, "cuda"), (2, None)):
        wrong = [*good]
        wrong[at] = bad
        with pytest.raises((ValueError, RuntimeError, AttributeError, TypeError)):
            helper.setup(*wrong)
        assert rig(*args) is None
    assert len(rig.driver.started) == 5


def crowd(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, a21,
    a22, a23, a24, a25, a26, a27, a28, a29, a30, a31, a32, a33, a34, a35, a36, a37, a38, a39, a40, a41, a42, a43,
    a44, a45, a46, a47, a48, a49, a50, a51, a52, a53, a54, a55, a56, a57, a58, a59, a60, a61, a62, a63, a64, a65,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pass


def test_a_kernel_of_more_arguments_than_the_helper_has_room_for(
    helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started without the helper."""
    monkeypatch.setattr(launch, "_helper", lambda: helper)
    monkeypatch.setattr(launch, "lane", lambda: "device")
    made = launch.Kernel(crowd, ()).bind(BLOCK=16)
    assert len(made.args) == 66
    assert made.native is None
    assert made.start == made._first
    assert launch.Kernel(plain, ()).bind(BLOCK=16).native is not None
