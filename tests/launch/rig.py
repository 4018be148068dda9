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


class Node(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        *((n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        *((n, ctypes.c_void_p) for n in ("params", "extra", "kernel", "context")),
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


class Graphs:
    """What makes and launches graphs, as functions of C that write down what they are told."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.made: list[list[tuple[int, int, int]]] = []
        """Of each graph its edges: (node, next node, type)."""
        self.of: list[list[int]] = []
        """The kernels of its nodes."""
        self.launched: list[tuple[int, int | None, list[tuple[int, tuple[int, ...], list[bytes]]]]] = []
        """(graph, stream, what its nodes were set to)."""
        self.destroyed: list[int] = []
        self.fails: dict[str, int] = {}
        """The codes that functions answer, by name."""
        self.set: dict[int, tuple[int, tuple[int, ...], list[bytes]]] = {}
        self.stream: dict[str, int | None] = {"priority": 0, "partition": None}
        self.wrong: list[Exception] = []
        self.mode = 0
        """What the thread may do while another captures: 2, anything."""
        p, out, code = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
        node = ctypes.POINTER(Node)
        kinds = {
            "create": (out, ctypes.c_uint),
            "add": (out, p, p, ctypes.c_size_t, node),
            "connect": (p, out, out, ctypes.POINTER(ctypes.c_ubyte), ctypes.c_size_t),
            "instantiate": (out, p, ctypes.c_ulonglong),
            "destroy": (p,),
            "change": (p, p, node),
            "launch": (p, p),
            "exchange": (ctypes.POINTER(ctypes.c_int),),
            "priority": (p, ctypes.POINTER(ctypes.c_int)),
            "partition": (p, out),
        }

        def answers(name: str) -> Any:
            def answer(*args: Any) -> int:
                try:  # what is raised here C does not see
                    assert name == "exchange" or self.mode == 2
                    if not self.fails.get(name):
                        getattr(self, name)(*args)
                except Exception as e:
                    self.wrong.append(e)
                return self.fails.get(name, 0)

            return answer

        self.functions = [ctypes.CFUNCTYPE(code, *kind)(answers(name)) for name, kind in kinds.items()]

    def addresses(self) -> tuple[int, ...]:
        return tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.functions)

    def priority(self, stream: int, out: Any) -> None:
        out[0] = self.stream["priority"]

    def partition(self, stream: int, out: Any) -> None:
        out[0] = self.stream["partition"]

    def exchange(self, mode: Any) -> None:
        self.mode, mode[0] = mode[0], self.mode

    def create(self, out: Any, flags: int) -> None:
        self.made.append([])
        self.of.append([])
        out[0] = len(self.made)

    def add(self, out: Any, graph: int, before: Any, count: int, node: Any) -> None:
        assert count == 0
        self.of[graph - 1].append(node[0].function)
        out[0] = 100 * graph + len(self.of[graph - 1])

    def connect(self, graph: int, first: Any, then: Any, edge: Any, count: int) -> None:
        assert count == 1
        assert edge[0] == edge[2]
        assert not any(edge[i] for i in (1, 3, 4, 5, 6, 7))
        self.made[graph - 1].append((first[0], then[0], edge[2]))

    def instantiate(self, out: Any, graph: int, flags: int) -> None:
        out[0] = 1000 + graph

    def destroy(self, graph: int) -> None:
        self.destroyed.append(graph)

    def change(self, ready: int, node: int, to: Any) -> None:
        n = to[0]
        assert node // 100 == ready - 1000
        assert (n.by, n.bz, n.extra, n.kernel, n.context) == (1, 1, None, None, None)
        count = self.driver.count[n.function] if isinstance(self.driver.count, dict) else self.driver.count
        params = ctypes.cast(n.params, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.string_at(params[i], 8) for i in range(count)]
        self.set[node] = n.function, (n.gx, n.gy, n.gz, n.bx, n.shared), values

    def launch(self, ready: int, stream: int | None) -> None:
        graph = ready - 1000
        nodes = [self.set.pop(100 * graph + i) for i in range(1, len(self.of[graph - 1]) + 1)]
        self.launched.append((graph, stream, nodes))


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
