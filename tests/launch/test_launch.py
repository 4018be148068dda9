"""What the launcher asks of Triton's own launch, and of a call before it: devices, kinds, captures, threads.

No device is needed: tensors are stand-ins with a pointer, a dtype and a device, and Triton's launch is recorded. What
the helper in C learns of it, and its key, is `test_launch_native`'s.
"""

import contextlib
import copy
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton.knobs", reason="the key is that of the Triton which has `knobs`; Ascend's has none")

import triton
import triton.language as tl

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


class Rig:
    """Triton's launch as a list of (arguments, grid, compiled alone?, current device)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[tuple[Any, ...], Any, bool, int]] = []
        self.current = 0
        self.patch = monkeypatch
        monkeypatch.setattr(launch, "_helper", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.on)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def bind(self, fn: Any = plain) -> launch.Launch:
        made = launch.Kernel(fn, ()).bind(BLOCK=64)

        def run(*args: Any, grid: Any, warmup: bool, **static: Any) -> object:
            assert static == {"BLOCK": 64}
            self.ran.append((args, grid, warmup, self.current))
            return object()

        self.patch.setattr(made.kernel.jit, "run", run)
        return made


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_constexprs_go_by_type_and_value() -> None:
    kernel = launch.Kernel(plain, ())
    bound = [kernel.bind(BLOCK=v) for v in (1, True, 1.0, 0.0, -0.0)]
    assert len({id(b) for b in bound}) == 5
    assert kernel.bind(BLOCK=1) is bound[0]
    assert kernel.bind(BLOCK=1, num_warps=8) is not bound[0]
    assert kernel.bind(BLOCK=1, num_warps=8) is kernel.bind(num_warps=8, BLOCK=1)


def test_it_runs_on_the_device_of_its_tensors(rig: Rig) -> None:
    one = rig.bind()
    for device in (0, 1):
        one((2, 1, 1), Pointer(16, device=device), Pointer(16, device=device), 5, 5)
    one((2, 1, 1), None, None, 5, 5)
    assert [(grid, warmup, device) for _, grid, warmup, device in rig.ran] == [
        ((2, 1, 1), False, 0),
        ((2, 1, 1), False, 1),
        ((2, 1, 1), False, 0),
    ]
    assert rig.current == 0


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_tensor_elsewhere_is_an_error(rig: Rig, wrong: int) -> None:
    one = rig.bind()
    for device in (-1, 1):
        pointers = [Pointer(16), Pointer(16)]
        pointers[wrong] = Pointer(16, device=device)
        # On device 1 the first one decides, and the other one is the stranger.
        name = "b" if device == 1 else "ab"[wrong]
        for call in (one, one.prepare):
            with pytest.raises(ArgumentError, match=f"plain: {name}"):
                call(*([(1, 1, 1)] if call is one else []), *pointers, 5, 5)
    assert not rig.ran


def test_compiling_during_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is: what is compiled runs by Triton's own launch there too."""
    compiled: list[Any] = []
    monkeypatch.setattr(
        triton.JITFunction, "_do_compile", lambda self, *args, **kwargs: compiled.append(args) or "made"
    )
    kernel = launch.Kernel(plain, ())
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert kernel.jit._do_compile(1) == "made"
    capturing = True
    with pytest.raises(HalError, match="plain would be compiled during graph capture"):
        kernel.jit._do_compile(2)
    assert compiled == [(1,)]


def test_prepare_compiles_and_starts_nothing(rig: Rig) -> None:
    args = (Pointer(16), Pointer(16), 1, None)
    rig.bind().prepare(*args)
    assert rig.ran == [(args, (1,), True, 0)]


def test_a_hook_that_refuses_to_compile_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig.bind()
    monkeypatch.setattr(one.kernel.jit, "run", lambda *args, **kwargs: None)
    with pytest.raises(HalError, match="plain: a jit_cache_hook of Triton refused"):
        one((1,), Pointer(16), Pointer(16), 5, 5)


@pytest.mark.parametrize("why", ["old", "no compiler"])
def test_without_the_helper_it_is_tritons_own_launch_and_says_so(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "old":
        monkeypatch.setattr(triton, "__version__", "3.5.1")
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: ctypes.pythonapi)
    monkeypatch.setattr(launch, "_why_no_helper", "")
    launch._helper.cache_clear()
    try:
        made = launch.Kernel(plain, ()).bind(BLOCK=64)
        assert (made.native, made.start) == (None, made._launch)
        said = launch.status()
        assert said.startswith("Triton's own launch: ")
        assert why != "old" or "Triton 3.5.1 is outside the tested range 3.6" in said
    finally:
        launch._helper.cache_clear()


def test_a_constexpr_global_is_known_by_identity() -> None:
    width = tl.constexpr(3)
    space: dict[str, Any] = {"WIDTH": width, "TABLE": [1]}
    jit = types.SimpleNamespace(
        cache_key="", used_global_vals={("WIDTH", 0): (copy.copy(width), space), ("TABLE", 0): ([1], space)}
    )
    used = launch._used_globals(types.SimpleNamespace(jit=jit))  # type: ignore[arg-type]
    # What is no constexpr may change in place: known by no identity, it leaves its kernel to Triton's own launch.
    assert [(name, value is space[name], where is space) for name, value, where in used] == [
        ("WIDTH", True, True),
        ("TABLE", False, True),
    ]


def test_threads_that_race_compile_one_after_the_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig.bind()
    made: list[int] = []
    cache: dict[int, int] = {}

    def run(*args: Any, **static: Any) -> object:
        if args[2] not in cache:
            time.sleep(0.01)  # another thread's turn
            made.append(args[2])
            cache[args[2]] = 1
        return object()

    monkeypatch.setattr(one.kernel.jit, "run", run)
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for n in range(5):
            one((1, 1, 1), None, None, n, 5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert made == list(range(5))


def test_wrong_arguments_are_named(rig: Rig) -> None:
    one = rig.bind()
    with pytest.raises(TypeError, match="parameter n"):
        one((1, 1, 1), Pointer(16), Pointer(16), "5", 5)
    with pytest.raises(TypeError, match="kernel plain: 4 arguments expected, 1 given"):
        one((1, 1, 1), Pointer(16))
    assert not rig.ran
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
        subprocess.run([sys.executable, path], check=True, env=env, timeout=600)
