"""A `Launch` around the helper: what it learns of Triton's own launch; the helper's objects, references, setup."""

import contextlib
import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from launch.rig import BASE, CPU, Rig, helper, plain
from triton import knobs

from hal.triton import launch

__all__ = ["helper"]


class Compiled:
    """What `launch.Launch` reads of a compiled kernel of Triton's."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True
    packed_metadata = (4, 1, 96)

    def __init__(self, function: int, signature: dict[str, str], **differs: Any) -> None:
        self.function, self.src, self.run = function, SimpleNamespace(signature=signature), self
        vars(self).update(differs)


@pytest.mark.parametrize("way", ["called", "prepared"])
@pytest.mark.parametrize(
    "differs",
    [
        {},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"launch_cooperative_grid": True},
        {"packed_metadata": (4, 2, 96)},
        {"packed_metadata": (4, 1)},
        {"src": SimpleNamespace(signature=dict.fromkeys("abnm", "tensordesc"))},
        {"src": None},
    ],
    ids=lambda d: "-".join(d) or "plain",
)
def test_a_launch_learns_what_triton_launched_where_the_helper_can_start_it(
    helper: Any, monkeypatch: pytest.MonkeyPatch, way: str, differs: dict[str, Any]
) -> None:
    """Where it can't, or Triton's internals have moved, all goes by Triton's own launch."""
    rig = Rig(helper)
    rig.driver.count = 4
    monkeypatch.setattr(launch, "_helper", lambda: helper)
    monkeypatch.setattr(launch, "lane", lambda: "device")
    monkeypatch.setattr(launch, "_why_no_helper", "")
    monkeypatch.setattr(launch.Launch, "_device", lambda self, args: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    ran: list[bool] = []

    def run(*args: Any, grid: Any, warmup: bool, **static: Any) -> Compiled:
        ran.append(warmup)
        return Compiled(77, {"a": "*u8", "b": "*u8", "n": "i32", "m": "i32"}, **differs)

    made = launch.Kernel(plain, ()).bind(BLOCK=64)
    monkeypatch.setattr(made.kernel.jit, "run", run)
    args = (BASE, BASE, 5, 6)
    if way == "called":
        made((3, 2, 1), *args)
    else:
        made.prepare(*args)
    made((3, 2, 1), *args)
    if differs:
        assert ran == [way == "prepared", False]
        assert not rig.driver.started
        moved = differs.get("src", 1) is None or differs.get("packed_metadata") == (4, 1)
        assert launch.status().startswith("Triton's own launch: Triton" if moved else "prebound")
    else:
        assert ran == [way == "prepared"]
        ((function, config, _),) = rig.driver.started
        assert (function, config) == (77, (3, 2, 1, 128, 96, 1))
        assert launch.status() == "prebound"


def crowd(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, a21,
    a22, a23, a24, a25, a26, a27, a28, a29, a30, a31, a32, a33, a34, a35, a36, a37, a38, a39, a40, a41, a42, a43,
    a44, a45, a46, a47, a48, a49, a50, a51, a52, a53, a54, a55, a56, a57, a58, a59, a60, a61, a62, a63, a64, a65,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pass


def test_a_kernel_of_more_arguments_than_the_helper_has_room_for(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started without the helper."""
    monkeypatch.setattr(launch, "_helper", lambda: helper)
    monkeypatch.setattr(launch, "lane", lambda: "device")
    made = launch.Kernel(crowd, ()).bind(BLOCK=16)
    assert len(made.args) == 66
    assert made.native is None
    assert made.start == made._launch
    assert launch.Kernel(plain, ()).bind(BLOCK=16).native is not None


def in_a_child(code: str, *, built: Any) -> str:
    """What `code` prints; a crash there is a failure here. `made(params, ...)` makes a launch of the helper's."""
    start = f"""
import gc, sys
from importlib.util import module_from_spec, spec_from_file_location
found = spec_from_file_location("hal_call", {built.__file__!r})
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
        ("slow, bytes(65), hooks, used", "ValueError"),
        ("slow, bytes(4), (), used", "TypeError"),
        ("slow, 'text', hooks, used", "TypeError"),
        ("slow, bytes(4), hooks", "TypeError"),
        ("slow, bytes(4), hooks, (*used, 1)", "TypeError"),
        ("slow, bytes(4), hooks, used, 1", "TypeError"),
        ("slow, bytes(4), hooks, used, name=1", "TypeError"),
    ],
)
def test_a_launch_that_can_t_be_made_keeps_and_drops_no_reference(helper: Any, arguments: str, error: str) -> None:
    told = in_a_child(
        f"""
slow, hooks, used = (lambda *a: 0), [], (("A", 1, dict()),)
before = [sys.getrefcount(x) for x in (slow, hooks, used)]
for _ in range(100):
    try:
        helper.Launch({arguments})
    except Exception as e:
        told = type(e).__name__
gc.collect()
assert [sys.getrefcount(x) for x in (slow, hooks, used)] == before
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
one = helper.Launch(lambda *a: "slow", bytes(2), [], ())
for again in (bytes(2), bytes(64)):
    try:
        one.__init__(lambda *a: 0, again, [], ())
    except TypeError as e:
        print(e)
print(one((1,), 2, 3))
""",
        built=helper,
    )
    assert told.splitlines() == ["not callable", "hal: a launch is made once", "hal: a launch is made once", "slow"]


def test_cycles_through_a_launch_are_collected(helper: Any) -> None:
    told = in_a_child(
        """
import weakref
class Owner:
    def slow(self, *a): pass
gone = []
for _ in range(50):
    owner = Owner()
    owner.native = helper.Launch(owner.slow, bytes(3), [owner], (("A", owner, {"B": owner}),))
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
    setup = [torch.Tensor.__dlpack_c_exchange_api__, *[None] * 5]
    drive = [CPU, *rig.driver.addresses(), knobs.runtime, knobs.compilation, None]
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    words = (ctypes.c_uint64 * 8)(9)  # of version 9
    newer = capsule(ctypes.addressof(words), b"dlpack_exchange_api", None)
    wrongs = (
        (helper.setup, setup, 0, object()),
        (helper.setup, setup, 0, newer),
        (helper.drive, drive, 4, object()),
        (helper.drive, drive, 0, "cuda"),
        (helper.drive, drive, 1, None),
    )
    for function, good, at, bad in wrongs:
        wrong = [*good]
        wrong[at] = bad
        with pytest.raises((ValueError, RuntimeError, AttributeError, TypeError)):
            function(*wrong)
        assert rig(*args) is None
    assert len(rig.driver.started) == 5
