"""The launcher on real devices: contexts, streams, devices, and arguments of every kind, warm and cold. ``ci/h200``."""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton.knobs")

import triton.language as tl

from hal._errors import ArgumentError
from hal.triton import launch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("HAL_LANE"):
    pytest.skip("needs a CUDA device", allow_module_level=True)

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@launch.jit(do_not_specialize=("n",))
def fill(out, n: tl.int32, x: tl.float32, y: tl.float64, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, (x + y + n).to(out.dtype.element_ty))


@launch.jit(do_not_specialize=("spins",))
def add_one(out, spins: tl.int32, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    found = tl.load(out + i)
    for k in range(spins):
        found += (k % 2 * 2 - 1) * 1.0
    tl.store(out + i, found + 1.0)


@launch.jit
def crowd(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, a21, a22, a23, a24,
    a25, a26, a27, a28, a29, a30, a31, a32, a33, a34, a35, a36, a37, a38, a39, a40, a41, a42, a43, a44, a45, a46, a47,
    a48, a49, a50, a51, a52, a53, a54, a55, a56, a57, a58, a59, a60, a61, a62, a63, a64, a65, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    tl.store(a0 + i, tl.load(a65 + i) + a1 + a64)


@pytest.fixture
def run() -> Iterator[launch.Launch]:
    """Fresh, so that its first call is a cold one."""
    fill._bound.clear()
    yield fill.bind(BLOCK=32)
    torch.cuda.synchronize()


def out(device: Any = "cuda", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((32,), -7.0, dtype=dtype, device=device)


def test_the_helper_is_there(run: launch.Launch) -> None:
    """Or nothing below says anything of it."""
    assert run.native is not None, launch._why_no_helper


@pytest.mark.parametrize(
    ("x", "y"), [(1.5, 2.25), (3, 4), (True, False), (2**31 + 1, -(2**40)), (2**63, 2**64 - 1), (0, 0.5)]
)
def test_numbers_of_every_kind_for_float_parameters(run: launch.Launch, x: Any, y: Any) -> None:
    want = float(torch.tensor(float(x), dtype=torch.float32)) + float(y) + 5
    for _ in range(3):
        t = out()
        run.start((1,), t, 5, x, y)
        assert t.tolist() == [want] * 32


def test_more_arguments_than_the_helper_has_room_for() -> None:
    tensors = [torch.arange(32.0, device="cuda") for _ in range(2)]
    args = (tensors[0], *range(2, 66), tensors[1])
    bound = crowd.bind(BLOCK=32)
    assert bound.native is None
    for _ in range(3):
        bound.start((1,), *args)
    assert tensors[0].tolist() == [i + 2.0 + 65 for i in range(32)]


@pytest.mark.parametrize("bad", [0.5, 2**31, -(2**31) - 1, 2**70])
def test_a_number_that_does_not_fit_is_an_error_warm_or_cold(run: launch.Launch, bad: Any) -> None:
    t = out()
    for _ in range(2):
        with pytest.raises((TypeError, OverflowError)):
            run.start((1,), t, bad, 1.0, 2.0)
        run.start((1,), t, 5, 1.0, 2.0)
    assert t.tolist() == [8.0] * 32


# --- streams ----------------------------------------------------------------------------------------


def test_the_current_stream_is_the_one_it_runs_on(run: launch.Launch) -> None:
    """Warm, and without an event between: order holds on one stream alone."""
    spin = add_one.bind(BLOCK=32)
    t = torch.zeros(32, device="cuda")
    spin.start((1,), t, 2)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for s in streams:
        t.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(s):
            # The first one takes milliseconds; on another stream the second would read what was there before it.
            spin.start((1,), t, 2 << 20)
            spin.start((1,), t, 2)
            done = t.clone()
        torch.cuda.synchronize()
        assert done.tolist() == [2.0] * 32


def test_it_is_captured_on_the_stream_that_captures(run: launch.Launch) -> None:
    t = out()
    run.start((1,), t, 5, 1.0, 2.0)
    torch.cuda.synchronize()
    t.fill_(-7.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.start((1,), t, 5, 1.0, 2.0)
    torch.cuda.synchronize()
    assert t.tolist() == [-7.0] * 32
    graph.replay()
    torch.cuda.synchronize()
    assert t.tolist() == [8.0] * 32


# --- contexts ---------------------------------------------------------------------------------------


def test_with_another_context_current_it_runs_or_says_so(run: launch.Launch) -> None:
    """As other libraries may leave one: never somewhere else, never nowhere in silence, and then all is as before."""
    t = out()
    run.start((1,), t, 5, 1.0, 2.0)
    torch.cuda.synchronize()
    t.fill_(-7.0)
    torch.cuda.synchronize()
    cuda = ctypes.CDLL("libcuda.so.1")
    context, popped = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    failed = False
    try:
        run.start((1,), t, 5, 1.0, 2.0)
    except RuntimeError:
        failed = True
    finally:
        assert cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
    torch.cuda.synchronize()
    assert t.tolist() == [-7.0 if failed else 8.0] * 32
    assert cuda.cuCtxDestroy_v2(context) == 0
    run.start((1,), t, 6, 1.0, 2.0)
    assert t.tolist() == [9.0] * 32


def test_without_any_context_current(run: launch.Launch) -> None:
    """As in a thread that has not used CUDA: torch's own is made current, or the call goes the slow way."""
    import threading

    t = out()
    run.start((1,), t, 5, 1.0, 2.0)
    torch.cuda.synchronize()
    t.fill_(-7.0)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def other() -> None:
        try:
            run.start((1,), t, 5, 1.0, 2.0)
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed, failed
    assert t.tolist() == [8.0] * 32


# --- devices ----------------------------------------------------------------------------------------


def test_tensors_on_the_host_are_refused(run: launch.Launch) -> None:
    run.start((1,), out(), 5, 1.0, 2.0)
    for bad in (out("cpu"), out("cpu").pin_memory(), out("meta")):
        with pytest.raises(ArgumentError, match="a CUDA tensor"):
            run.start((1,), bad, 5, 1.0, 2.0)


@two
@pytest.mark.parametrize("warm", [False, True])
def test_a_tensor_of_another_device_than_the_current_one(run: launch.Launch, warm: bool) -> None:
    """It runs where the tensor is, on that device's current stream; the current device stays."""
    if warm:
        with torch.cuda.device(1):
            run.start((1,), out("cuda:1"), 5, 1.0, 2.0)
            run.start((1,), out("cuda:1"), 5, 1.0, 2.0)
    for _ in range(3):
        for d in (1, 0):
            t = out(f"cuda:{d}")
            run.start((1,), t, 5, 1.0, 2.0)
            assert torch.cuda.current_device() == 0
            assert t.tolist() == [8.0] * 32
    s = torch.cuda.Stream(1)
    t = torch.zeros(32, device="cuda:1")
    spin = add_one.bind(BLOCK=32)
    spin.start((1,), t, 2)
    t.zero_()
    torch.cuda.synchronize(1)
    with torch.cuda.stream(s):
        torch.cuda.set_device(0)
        spin.start((1,), t, 2 << 20)
        spin.start((1,), t, 2)
        with torch.cuda.device(1), torch.cuda.stream(s):
            done = t.clone()
    torch.cuda.synchronize(1)
    assert done.tolist() == [2.0] * 32


@two
def test_tensors_of_two_devices_are_refused() -> None:
    from hal.backends.cuda.get_last_loc import get_last_loc

    table = torch.arange(8, dtype=torch.int32, device="cuda:0").view(2, 4)
    index = [torch.tensor([1], device=f"cuda:{d}") for d in (0, 1)]
    assert get_last_loc(table, index[0], index[0]).tolist() == [4]
    with pytest.raises(ArgumentError, match="cuda:"):
        get_last_loc(table, index[1], index[0])
    assert get_last_loc(table, index[0], index[0]).tolist() == [4]
