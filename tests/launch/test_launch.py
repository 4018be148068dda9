"""The launcher's key against Triton's own specialisation, its guards, and the interpreter's casts.

No device is needed: tensors are stand-ins with a pointer, a dtype and a device, and the compiler and the C
launcher are recorded. What a stale cache would do shows as a launch of the wrong binary.
"""

import copy
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import types
from typing import Any

import pytest
import torch

pytest.importorskip(
    "triton.knobs", reason="the key is that of the Triton which has `knobs`; Ascend's has none"
)

import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from hal._errors import ArgumentError, HalError
from hal.triton import launch

if os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("HAL_LANE"):
    pytest.skip("tests the device lane's launcher", allow_module_level=True)


class Pointer:
    """What the launcher may ask of a tensor."""

    def __init__(self, address: int, dtype: torch.dtype = torch.float32, device: int = 0) -> None:
        self.address, self.dtype, self.index = address, dtype, device
        self.device = f"cuda:{device}" if device >= 0 else "cpu"

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.index


def plain(a, b, n, m, BLOCK: tl.constexpr):
    pass


def typed(a, n: tl.int64, x: tl.int32, BLOCK: tl.constexpr):
    pass


class Compiled:
    """A compiled kernel that remembers what it was compiled for."""

    def __init__(self, made: list[Any], args: Any) -> None:
        self.args, self.started = args, []
        self.function, self.packed_metadata, self.run = len(made), ("warps",), self
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = False, False
        made.append(self)

    def launch(self, *values: Any) -> None:
        self.started.append(values)


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Compiled] = []
        self.streams = {0: 70, 1: 71}
        self.current = 0
        monkeypatch.setattr(launch, "_compile", lambda one, args: launch._Bound(Compiled(self.made, args)))
        monkeypatch.setattr(launch, "_stream", lambda device: self.streams[device])
        monkeypatch.setattr(launch, "_current_device", lambda: self.current)
        monkeypatch.setattr(launch, "_why_not_prebound", None)
        monkeypatch.setattr(launch, "_helper", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", self.on)

    def on(self, device: int) -> Any:
        rig = self

        class Guard:
            def __enter__(self) -> None:
                self.old, rig.current = rig.current, device

            def __exit__(self, *_: Any) -> None:
                rig.current = self.old

        return Guard()

    def started(self) -> list[tuple[int, tuple[Any, ...]]]:
        return [(c.function, s) for c in self.made for s in c.started]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def triton_key(kernel: launch.Kernel, args: tuple[Any, ...], **static: Any) -> str:
    """What Triton itself compiles `args` for."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    binder = create_function_from_signature(
        kernel.jit.signature, kernel.jit.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    return str(binder(*args, **static)[1])


ADDRESSES = st.sampled_from([0, 16, 4096, 4098, 8, 24, 1 << 40, (1 << 40) + 2])
DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.float8_e4m3fn, torch.bool]
)
POINTERS = st.builds(Pointer, ADDRESSES, DTYPES)
INTS = st.one_of(
    st.sampled_from([0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1,
                     2**63 - 1, 2**63]),
    st.integers(-(2**63), 2**64 - 1),
)  # fmt: skip
ANY = st.one_of(INTS, st.booleans(), st.floats(), st.none(), POINTERS)
FROZEN = st.sets(st.sampled_from(["a", "b", "n", "m"]))


@settings(max_examples=60, deadline=None)
@given(
    frozen=FROZEN,
    calls=st.lists(st.tuples(POINTERS, POINTERS, ANY, ANY), min_size=2, max_size=6),
)
def test_a_binary_serves_only_arguments_that_triton_would_give_it(
    frozen: set[str], calls: list[tuple[Any, ...]]
) -> None:
    """Two calls that share a compiled kernel have the same specialisation in Triton; and a call repeats its own."""
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        kernel = launch.Kernel(plain, tuple(frozen))
        one = kernel.bind(BLOCK=64)
        served: dict[int, str] = {}
        for args in itertools.chain(calls, calls):
            one((1, 1, 1), *args)
            (which,) = [c.function for c in rig.made if c.started]
            rig.made[which].started.clear()
            mine = triton_key(kernel, args, BLOCK=64)
            assert served.setdefault(which, mine) == mine
        assert len(rig.made) <= len(calls)


def test_alignment_is_in_the_key(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    for address in (4096, 4098, 8192, 4100):
        one((1, 1, 1), Pointer(address), Pointer(16), 5, 5)
    assert [f for f, _ in rig.started()] == [0, 0, 1, 1]


def test_which_pointer_is_misaligned_is_in_the_key(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    one((1, 1, 1), Pointer(8), Pointer(16), 5, 5)
    one((1, 1, 1), Pointer(16), Pointer(8), 5, 5)
    assert len(rig.made) == 2


@pytest.mark.parametrize("frozen", [(), ("n", "m")])
def test_width_of_an_integer_goes_by_value_even_where_it_is_not_specialised(
    rig: Rig, frozen: tuple[str, ...]
) -> None:
    one = launch.Kernel(plain, frozen).bind(BLOCK=64)
    for n in (3, 2**31 - 1, 2**31 + 5, 2**63 + 5, 7, -(2**31), -(2**31) - 5):
        one((1, 1, 1), Pointer(16), Pointer(16), n, 5)
    compiled_for = {c.args[2] for c in rig.made}
    assert {3, 2**31 + 5, 2**63 + 5} <= compiled_for
    assert len(rig.made) == (3 if frozen else 4)  # -(2**31) is divisible by 16


def test_an_annotated_integer_is_one_binary(rig: Rig) -> None:
    one = launch.Kernel(typed, ("a", "n", "x")).bind(BLOCK=64)
    for n in (1, 16, 5, 2**31 + 1, -1):
        one((1, 1, 1), Pointer(16), n, 4)
    assert len(rig.made) == 1


def test_bool_float_none_and_int_are_different(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    for value in (1, True, 1.0, None, 0, False, 0.0):
        one((1, 1, 1), Pointer(16), Pointer(16), value, 5)
    assert len({triton_key(one.kernel, c.args, BLOCK=64) for c in rig.made}) == len(rig.made) == 5


def test_constexprs_go_by_type_and_value() -> None:
    kernel = launch.Kernel(plain, ())
    bound = [kernel.bind(BLOCK=v) for v in (1, True, 1.0, 0.0, -0.0)]
    assert len({id(b) for b in bound}) == 5
    assert kernel.bind(BLOCK=1) is bound[0]
    assert kernel.bind(BLOCK=1, num_warps=8) is not bound[0]
    assert kernel.bind(BLOCK=1, num_warps=8) is kernel.bind(num_warps=8, BLOCK=1)


def test_device_is_in_the_key_and_the_launch_goes_to_its_stream(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    for device in (0, 1, 0, 1):
        one((2, 1, 1), Pointer(16, device=device), Pointer(16, device=device), 5, 5)
    assert len(rig.made) == 2
    assert [[s[3] for s in c.started] for c in rig.made] == [[70, 70], [71, 71]]


def test_the_stream_is_read_at_every_launch(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    for stream in (5, 6):
        rig.streams[0] = stream
        one((1, 1, 1), Pointer(16), Pointer(16), 5, 5)
    assert [s[3] for _, s in rig.started()] == [5, 6]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_tensor_elsewhere_is_an_error_also_when_its_form_is_compiled(rig: Rig, wrong: int) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    one((1, 1, 1), Pointer(16), Pointer(16), 5, 5)
    for device in (-1, 1):
        pointers = [Pointer(16), Pointer(16)]
        pointers[wrong] = Pointer(16, device=device)
        if wrong == 0 and device == 1:
            continue  # then the other one is the stranger
        with pytest.raises(ArgumentError, match=r"plain: [ab]"):
            one((1, 1, 1), *pointers, 5, 5)
    assert len(rig.started()) == 1


def test_hooks_and_knobs_take_tritons_own_launch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    own: list[Any] = []
    monkeypatch.setattr(launch.Launch, "triton_launch", lambda self, grid, *args: own.append(args))
    args = (Pointer(16), Pointer(16), 5, 5)
    one((1, 1, 1), *args)

    def hook(*_: Any, **__: Any) -> None: ...

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        one((1, 1, 1), *args)
        chain.remove(hook)
    one.kernel.jit.add_pre_run_hook(hook)
    one((1, 1, 1), *args)
    one.kernel.jit.pre_run_hooks.clear()
    for space, name, value in (
        (knobs.runtime, "launch_enter_hook", hook), (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "fpsan"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(space, name, value)
            one((1, 1, 1), *args)
    assert len(own) == 6
    one((1, 1, 1), *args)
    assert len(own) == 6
    assert len(rig.started()) == 2


def test_compiling_during_capture_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    args = (Pointer(16), Pointer(16), 5, 5)
    one.prepare(*args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one((1, 1, 1), *args)
    with pytest.raises(HalError, match="graph capture"):
        one((1, 1, 1), Pointer(8), *args[1:])
    assert len(rig.made) == 1


def test_prepare_compiles_what_the_call_then_uses(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    one.prepare(Pointer(16), Pointer(16), 1, None)
    assert not rig.started()
    one((1, 1, 1), Pointer(32), Pointer(16), 1, None)
    assert len(rig.made) == len(rig.started()) == 1


def test_moved_internals_fall_back_and_say_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[Any] = []
    monkeypatch.setattr(launch.Launch, "triton_launch", lambda self, grid, *args: own.append(args))
    monkeypatch.delattr(Compiled, "launch")
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    for _ in range(2):
        one((1, 1, 1), Pointer(16), Pointer(16), 5, 5)
    assert len(own) == 2
    assert "Triton's own launch" in launch.status()


def test_a_constexpr_global_is_known_by_identity_and_a_new_one_noticed() -> None:
    width = tl.constexpr(3)
    space: dict[str, Any] = {"WIDTH": width, "TABLE": [1]}
    jit = types.SimpleNamespace(
        cache_key="",
        used_global_vals={
            ("WIDTH", 0): (copy.copy(width), space),
            ("TABLE", 0): ([1], space),
        },
    )
    used = launch._used_globals(types.SimpleNamespace(jit=jit))  # type: ignore[arg-type]
    assert used[0][1] is width
    assert not launch._changed(used)
    space["WIDTH"] = tl.constexpr(3)
    assert not launch._changed(used)
    space["WIDTH"] = tl.constexpr(4)
    assert launch._changed(used)
    space["WIDTH"] = width
    space["TABLE"].append(2)
    assert launch._changed(used)


def test_a_changed_global_is_not_served_from_the_cache(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[Any] = []
    monkeypatch.setattr(launch.Launch, "triton_launch", lambda self, grid, *args: own.append(args))
    space = {"LIMIT": 3}
    monkeypatch.setattr(launch, "_used_globals", lambda kernel: [("LIMIT", 3, space)])
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    args = (Pointer(16), Pointer(16), 5, 5)
    one((1, 1, 1), *args)
    one((1, 1, 1), *args)
    assert not own
    space["LIMIT"] = 4
    one((1, 1, 1), *args)
    assert len(own) == 1


def test_threads_that_race_to_compile_make_one_binary(rig: Rig) -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(50):
            one((1, 1, 1), Pointer(16), Pointer(16), 5, 5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(rig.made) == 1
    assert len(rig.started()) == 400


def test_grid_of_one_or_two_numbers(rig: Rig) -> None:
    kernel = launch.Kernel(plain, ())
    for grid in ((3,), (3, 2), (3, 2, 4)):
        for _ in range(2):
            kernel(grid, Pointer(16), Pointer(16), 5, 5, BLOCK=64)
    assert [s[:3] for _, s in rig.started()] == [(3, 1, 1)] * 2 + [(3, 2, 1)] * 2 + [(3, 2, 4)] * 2


def test_wrong_arguments_are_named() -> None:
    one = launch.Kernel(plain, ()).bind(BLOCK=64)
    with pytest.raises(TypeError, match="parameter n"):
        one((1, 1, 1), Pointer(16), Pointer(16), "5", 5)
    with pytest.raises((TypeError, HalError)):
        one((1, 1, 1), Pointer(16))
    with pytest.raises(HalError, match="no parameter"):
        launch.Kernel(plain, ("typo",))


def test_casts_of_the_interpreter_are_torchs() -> None:
    """At the rounding boundaries, and past the largest number of each type."""
    from hal.triton.interpreter import convert

    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-130, 3.0e38, 0.0, -0.0, 1e-46])
    for dst in (torch.bfloat16, torch.float16):
        got = convert(ties.numpy(), torch.float32, dst).view("int16")
        assert (torch.from_numpy(got) == ties.to(dst).view(torch.int16)).all()
    for dst in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dst).max
        x = torch.tensor(
            [1e9, -1e9, float("inf"), -float("inf"), float("nan"), largest, 1.0625, 1.1875, 2**-9, 2**-10 * 3]
        )
        got = torch.from_numpy(convert(x.numpy(), torch.float32, dst)).view(dst).float()
        want = x.clamp(-largest, largest).to(dst).float()
        assert torch.equal(got[:4], torch.tensor([largest, -largest, largest, -largest]))
        assert got[4].isnan()
        assert torch.equal(got[5:], want[5:])


def test_a_kernel_runs_under_the_interpreter_with_those_casts() -> None:
    """fp32 -> bf16 rounds to nearest, which Triton 3.6's own interpreter doesn't."""
    program = """
import torch, triton.language as tl
from hal.triton import launch
assert launch.lane() == "interpreter", launch.lane()
@launch.jit
def cast(x, y, z, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(y + i, v.to(tl.bfloat16))
    tl.store(z + i, v.to(tl.float8e4nv))
x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e9, 3.1])
y, z = torch.empty(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.float8_e4m3fn)
cast((1,), x, y, z, N=4)
assert torch.equal(y, x.bfloat16()), y
assert torch.equal(z.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float()), z
"""
    folder = os.path.join(os.path.dirname(__file__), "..")
    with tempfile.TemporaryDirectory() as where:
        path = os.path.join(where, "program.py")
        with open(path, "w") as file:
            file.write(program)
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": folder}
        subprocess.run([sys.executable, path], check=True, env=env, timeout=120)
