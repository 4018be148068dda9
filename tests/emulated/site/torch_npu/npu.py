"""``torch.npu``, as far as hal and the tests use it: names and parameters as the published wheel has them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from torch_npu._runtime import check, drain, launch, lib

DEVICES = 2
MEMORY = 64 << 30
emulated = True
"""What tells hal's reports that there is no device."""


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return int(lib.npu_device())


def set_device(device: Any) -> None:
    lib.npu_set_device(_index(device))


def get_device_name(device_name: Any = None) -> str:
    return "Ascend910B3, emulated"


def get_device_properties(device_name: Any = None) -> Any:
    return SimpleNamespace(name=get_device_name(device_name), total_memory=MEMORY)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, all) bytes."""
    return MEMORY - memory_allocated(device), MEMORY


def empty_cache() -> None:
    pass


def manual_seed_all(seed: int) -> None:
    """Nothing to do: random numbers are the host's, which `torch.manual_seed` seeds before it asks here."""


def set_compile_mode(jit_compile: bool = False) -> None:
    pass


config = SimpleNamespace(allow_internal_format=False)


def memory_allocated(device: Any = None) -> int:
    return int(lib.npu_used(_index(device)))


def synchronize(device: Any = None) -> None:
    where = _index(device)
    for stream in range(lib.npu_streams(where) + 1):
        drain(where, stream, lib.npu_put(where, stream))


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    found = device if isinstance(device, int) else torch.device(device).index
    if found is None:
        return current_device()
    if not 0 <= found < DEVICES:
        raise RuntimeError(f"npu: no device {found}")
    return int(found)


class device:
    """The current device within a block."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        lib.npu_set_device(self.index)

    def __exit__(self, *args: Any) -> None:
        lib.npu_set_device(self.before)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> Stream:
        where = _index(device)
        which = int(lib.npu_new_stream(where)) if stream_id is None else stream_id
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        return super().__new__(cls, stream_id=which, device_index=where, device_type=kind)

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    def synchronize(self) -> None:
        drain(self.device.index, self.stream_id, lib.npu_put(self.device.index, self.stream_id))

    def query(self) -> bool:
        put = lib.npu_put(self.device.index, self.stream_id)
        return bool(lib.npu_query(self.device.index, self.stream_id, put))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.at: tuple[int, int, int] | None = None
        self.timed, self.seconds = enable_timing, float("nan")

    def _reach(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Of this machine, from when the one was reached until the other was."""
        if not (self.timed and end_event.timed and self.query() and end_event.query()):
            raise RuntimeError("npu: events without timing, or not reached yet")
        return (end_event.seconds - self.seconds) * 1e3

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        where, which = stream.device.index, stream.stream_id
        if self.timed:
            launch(where, self._reach, which)
        self.at = where, which, lib.npu_put(where, which)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self.at is not None:
            lib.npu_wait(stream.device.index, stream.stream_id, *self.at)

    def query(self) -> bool:
        return self.at is None or bool(lib.npu_query(*self.at))

    def synchronize(self) -> None:
        if self.at is not None:
            drain(*self.at)


def current_stream(device: Any = None) -> Stream:
    where = _index(device)
    return Stream(where, stream_id=int(lib.npu_stream(where)))


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)


def set_stream(stream: Stream) -> None:
    lib.npu_set_device(stream.device.index)
    lib.npu_set_stream(stream.device.index, stream.stream_id)


class StreamContext:
    """The current stream within a block."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = current_stream(), current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, *args: Any) -> None:
        current, there = self.before
        set_stream(there)
        set_stream(current)


def is_current_stream_capturing() -> bool:
    return bool(lib.npu_capturing(current_device()))


class NPUGraph:
    """What a stream was given between `capture_begin` and `capture_end`, with the addresses and values of that time."""

    def __init__(self) -> None:
        self.held: int | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        at = current_stream()
        if at.stream_id == 0 or lib.npu_capturing(at.device.index):
            raise RuntimeError("npu: the default stream, and one that is captured already, can't be captured")
        self.at = at.device.index, at.stream_id
        lib.npu_capture(*self.at)

    def capture_end(self) -> None:
        self.reset()
        self.held = lib.npu_captured(*self.at)
        check()

    def replay(self) -> None:
        if self.held is not None:
            lib.npu_replay(self.at[0], self.held)

    def reset(self) -> None:
        if self.held is not None:
            lib.npu_reset(self.held)
        self.held = None


class graph:
    """A capture within a block, on a side stream. The wheel's other arguments are not emulated."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        if pool is not None or auto_dispatch_capture or capture_error_mode != "global":
            raise NotImplementedError("not emulated: a pool, automatic dispatch, or another mode of a capture")
        self.npu_graph, self.stream = npu_graph, stream

    def __enter__(self) -> None:
        synchronize()
        self.within = stream(self.stream or Stream())
        self.within.__enter__()
        self.npu_graph.capture_begin()

    def __exit__(self, *args: Any) -> None:
        try:
            self.npu_graph.capture_end()
        finally:
            self.within.__exit__()


def stream(stream: Stream) -> StreamContext:
    return StreamContext(stream)
