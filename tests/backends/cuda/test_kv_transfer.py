"""kv_transfer of this backend where the suite leaves it the choice: every sample by copies, and in several chunks."""

import os
from typing import Any

import pytest
import torch

from hal import ops
from hal._remote.target import DirectTarget
from hal.backends.cuda import _staging
from hal.backends.cuda.kv_transfer import kv_transfer
from hal.conformance.execute import execute
from hal.kv.pool import KVPool

CUDA = torch.cuda.is_available()
SPEC = ops.get_spec("kv_transfer")
SAMPLES = [s for s in SPEC.samples if not s.large][:: 1 if CUDA or os.environ.get("CI_ALL") else 3]
WAYS = ("device-to-host-cpu-slots", "host-to-device-cpu-slots") if CUDA else ("",)

pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def judge(where: str, **params: Any) -> None:
    target = DirectTarget.of("kv_transfer", kv_transfer, "cuda" if CUDA else "cpu")
    execute(SPEC, SPEC.make(**{**params, "method": "direct"}), target, where=where)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_sample(sample: Any, way: str) -> None:
    judge(way, **sample.params)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_pipeline_over_several_chunks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than both staging buffers hold, in broken runs."""
    monkeypatch.setattr(_staging, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(_staging, "_buffers", {})
    some = {"n": 60, "src_slots": 128, "dst_slots": 128, "order": "pages"}
    judge(WAYS[0], **some, src="layer_first", dst=layout)
    if CUDA:
        judge(WAYS[1], **some, src=layout, dst="layer_first")


def test_a_later_transfer_finds_where_the_pools_are_now() -> None:
    """Pools that rows have gone between are known by where they lie: given other memory, they are read there."""
    where = "cuda" if CUDA else "cpu"
    slots = torch.arange(4, device=where, dtype=torch.int64)
    memory = torch.ones(2, 8, 2, 16, device=where, dtype=torch.bfloat16)
    src = KVPool(memory, layout="layer_first")
    dst = KVPool(torch.zeros_like(memory), layout="layer_first")
    for n in (1, 2):
        kv_transfer(src, dst, slots[:n], slots[:n], method="kernel")
    assert dst.k.sum() == 2 * 2 * 32
    memory.set_(torch.full_like(memory, 3))
    kv_transfer(src, dst, slots, slots, layers=range(1, 2), method="kernel")
    kv_transfer(src, dst, slots[:0], slots[:0], method="kernel")
    assert dst.k[0].sum() == 2 * 32
    assert dst.k[1].sum() == 3 * 4 * 32


@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_parts_of_a_staged_transfer(out: bool, tokens: int) -> None:
    """Whole granules that fit a buffer, none left out, and a small one where the bus would wait for it."""
    route = object.__new__(_staging._Route)
    route.out, route.tokens, route.per_chunk, route.small = out, tokens, 912, 112
    for n in range(tokens, 6000, 7 * tokens):
        parts = route.parts(n)
        assert [p.start for p in parts] + [n] == [0] + [p.stop for p in parts]
        sizes = [p.stop - p.start for p in parts]
        assert all(0 < size <= 912 and size % tokens == 0 for size in sizes)
        assert sizes[0] == route.first(n)
        assert sizes[0 if out else -1] == min(n, 112)


class Stream:
    """Remembers, of everything that it is given, what that comes after."""

    cuda_stream = 1

    def __init__(self) -> None:
        self.done: frozenset[Any] = frozenset()

    def wait_event(self, event: Any) -> None:
        self.done |= event.done

    def do(self, what: Any) -> frozenset[Any]:
        before, self.done = self.done, self.done | {what}
        return before


class Event:
    def query(self) -> bool:
        return True

    def record(self, stream: Stream) -> None:
        self.done = stream.done


@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("bad", [None, 0, -1])
def test_a_staged_transfer_waits_for_what_it_uses(
    out: bool, n: int, bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer for its user before, a gather for the slots, a copy out for its gather, a scatter for its copy, all
    of it for what was there before, and what comes next for all of it, also where a slot is out of range."""
    now, *sides = (Stream() for _ in range(3))
    current = [now]

    def select(stream: Stream) -> None:
        current[0] = stream

    class Route:
        def __init__(self) -> None:
            self.out, self.layers, self.tokens, self.per_chunk, self.slots, self.host_slots = out, 1, 1, 0, n, n
            self.users: list[list[Any]] = [[], []]

        def first(self, n: int) -> int:
            return 1

        def parts(self, n: int) -> list[slice]:
            return [slice(i, i + 1) for i in range(n)]

        def run_of(self, slots: Any) -> bool:
            return bool(slots[0] >= 0)

        def use(self, what: str, i: int, before: frozenset[Any]) -> None:
            assert {"before", *self.users[i]} <= before, what
            self.users[i].append((what, i, len(self.users[i])))

        def move(self, i: int, places: Any, slots: Any) -> None:
            assert "upload" in current[0].done
            self.use("move", i, current[0].do(("move", i, len(self.users[i]))))

        def copy(self, i: int, slots: Any, stream: Stream) -> None:
            self.use("copy", i, stream.do(("copy", i, len(self.users[i]))))

        def copy_run(self, i: int, first: int, n: int, stream: Stream) -> None:
            self.copy(i, None, stream)

    host = KVPool(torch.zeros(1, n, 4, device="cpu", dtype=torch.float32), layout="layer_first")
    key, route, slots = (id(host.planes()[0]),) * 2, Route(), torch.arange(n, dtype=torch.int64, device="cpu")
    if bad is not None:
        slots[bad] = -1
    events = Event(), Event(), (Event(), Event())
    found = _staging._Buffers(host.k, now, tuple(sides), *events, host.k, slots.clone(), slots, {}, {key: route})
    monkeypatch.setattr(_staging, "buffers", lambda device: found)
    monkeypatch.setattr(_staging._engine, "one", lambda *args: current[0].do("upload"))
    monkeypatch.setattr(torch.cuda, "set_stream", select)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    now.do("before")
    done = _staging.transfer(host, host, slots, slots, 1, torch.device("cpu"))
    every = [use for users in route.users for use in users]
    assert current == [now]
    assert {"upload", *every} <= now.done
    if bad is None:
        assert done == n
        assert len(every) == 2 * n
        assert [what for what, *_ in route.users[0][:2]] == (["move", "copy"] if out else ["copy", "move"])
    else:  # what came before the bad slot, where that was on its way
        assert done == (1 if out and n > 1 and bad else 0)
        assert len(every) == (2 if done else 1 if out or (n > 1 and bad) else 0)
