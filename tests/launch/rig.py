"""The launcher's helper in C, without a device: CPU tensors, and a driver that only writes down what it is told."""

import ctypes
import os
import shlex
import shutil
from typing import Any

import pytest
import torch

pytest.importorskip("triton.knobs", reason="the helper serves the Triton which has `knobs`")

import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from hal.ops import _native
from hal.triton import launch

if os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("HAL_LANE"):
    pytest.skip("tests the device lane's launcher", allow_module_level=True)
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no DLPack exchange interface", allow_module_level=True)
if shutil.which(shlex.split(os.environ.get("CC", "gcc"))[0]) is None and shutil.which("clang") is None:
    pytest.skip("no C compiler", allow_module_level=True)

CPU = 1  # DLPack's number
EMPTY = torch._C._dynamo.guards._empty_strided_cpu


class Config(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("attributes", ctypes.c_uint),
    ]


class Driver:
    """cuLaunchKernelEx, cuCtxGetDevice and cuStreamIsCapturing as functions of C."""

    def __init__(self) -> None:
        self.started: list[tuple[int, tuple[int, ...], list[bytes]]] = []
        self.device, self.code, self.capturing = 0, 0, 0
        self.count: int | dict[int, int] = 0
        """How many arguments to look at; by the function, where there are several."""
        start = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        where = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        capturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self.functions = start(self.start), where(self.where), capturing(self.asked)

    def start(self, config: Any, function: int, params: Any, extra: Any) -> int:
        c = config[0]
        count = self.count[function] if isinstance(self.count, dict) else self.count
        values = [ctypes.string_at(params[i], 8) for i in range(count)]
        self.started.append((function, (c.gx, c.gy, c.gz, c.bx, c.shared, c.attributes), values))
        return self.code

    def where(self, out: Any) -> int:
        out[0] = self.device
        return 0

    def asked(self, stream: int, out: Any) -> int:
        out[0] = self.capturing
        return 0

    def addresses(self) -> list[int]:
        return [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.functions]


@pytest.fixture(scope="module")
def helper() -> Any:
    """The module of the launcher in C."""
    return _native.module()


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
        helper.drive(CPU, *self.driver.addresses(), knobs.runtime, knobs.compilation, EMPTY)
        self.kernel = launch.Kernel(fn, frozen)
        self.binder = create_function_from_signature(
            self.kernel.jit.signature, self.kernel.jit.params, CUDABackend(GPUTarget("cuda", 90, 32))
        )
        self.params = [p for p in self.kernel.params if not p.constexpr]
        self.functions: dict[str, int] = {}
        self.slow_calls: list[tuple[Any, ...]] = []
        self.pre_run: list[Any] = []
        self.space: dict[str, Any] = {"WIDTH": 3}
        params = bytes(1 * p.specialize + 2 * p.typed for p in self.params)
        self.native = helper.Launch(self.slow, params, self.pre_run, (("WIDTH", self.space["WIDTH"], self.space),))

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
