# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""The streaming copy kernel of kv_transfer: rows between any two strided descriptions of a pool.

A row is one (token, layer, half) or, in page_head, one head of it. Tiles of rows are kept in flight; the
rows of a tile follow the host side's order, so that what goes over the bus is as consecutive as it can be.
"""

import itertools
import weakref

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal._errors import ArgumentError, HalError
from hal.backends.cuda._cache import Plans
from hal.backends.cuda._device import multiprocessors, next_power_of_2, pdl
from hal.kv.pool import KVPool, Plane
from hal.triton import launch
from hal.triton import plans as kinds

TILE_BYTES = 32768
WARPS = 32
STREAM_PROGRAMS = 8
"""Programs, so multiprocessors at most, that a transfer over the bus occupies."""
MOST_ROWS = 2**31 - 2**20
"""Of a launch: what is a tile past it is still an int32."""
UNIT_INNER, PAIR_INNER, CHUNK_OUTER = 0, 1, 2


@launch.jit(
    do_not_specialize="""
    src_slots dst_slots src_bases dst_bases n units first count src_size dst_size src_page src_token
    src_chunk dst_page dst_token dst_chunk layers
    """.split()
)
def copy_rows_kernel(
    src_slots, dst_slots, src_bases, dst_bases,
    n: tl.int32, units: tl.int32, first: tl.int32, count: tl.int32, layers: tl.int32,
    src_size: tl.int64, dst_size: tl.int64,
    src_page: tl.int64, src_token: tl.int64, src_chunk: tl.int64,
    dst_page: tl.int64, dst_token: tl.int64, dst_chunk: tl.int64,
    SRC_PAGE: tl.constexpr, DST_PAGE: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
    ALIGN: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = n * units * CHUNKS
    w = tl.arange(0, next_power_of_2(WORDS))[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS)
        there = r < rows
        if ORDER == 0:
            chunk, pair, unit = r % CHUNKS, r // CHUNKS // units, r // CHUNKS % units
        elif ORDER == 1:
            chunk, pair, unit = r % CHUNKS, r // CHUNKS % n, r // CHUNKS // n
        else:
            chunk, pair, unit = r // units % CHUNKS, r // units // CHUNKS, r % units
        s = tl.load(src_slots + pair, there, other=-1).to(tl.int64)
        d = tl.load(dst_slots + pair, there, other=-1).to(tl.int64)
        there = there & (s >= 0) & (s < src_size) & (d >= 0) & (d < dst_size)
        s = tl.where(there, s, 0)
        d = tl.where(there, d, 0)
        plane = unit // count * layers + first + unit % count
        a = tl.load(src_bases + plane, there, other=0)
        b = tl.load(dst_bases + plane, there, other=0)
        a += s // SRC_PAGE * src_page + s % SRC_PAGE * src_token + chunk.to(tl.int64) * src_chunk
        b += d // DST_PAGE * dst_page + d % DST_PAGE * dst_token + chunk.to(tl.int64) * dst_chunk
        source = tl.multiple_of(a.to(tl.pointer_type(WORD))[:, None], [ALIGN, ALIGN])
        target = tl.multiple_of(b.to(tl.pointer_type(WORD))[:, None], [ALIGN, ALIGN])
        mask = there[:, None] & (w < WORDS)
        tl.store(target + w, tl.load(source + w, mask), mask)


def programs(src: KVPool, dst: KVPool, device: torch.device) -> int:
    """How many programs a copy is given: few over the bus, the whole device within it."""
    if src.device.type == dst.device.type == "cuda":
        return 4 * multiprocessors(device.index or 0)
    return STREAM_PROGRAMS


def upload(slots: Tensor, device: torch.device) -> Tensor:
    """CPU slots to the device, in stream order, without waiting."""
    return slots if device.type == "cpu" else slots.pin_memory().to(device, non_blocking=True)


def rows(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: range | None, device: torch.device
) -> None:
    """Copy between pools, of all layers or some."""
    if not again(src, dst, src_slots, dst_slots, layers):
        _need_pinned(src, dst)
        a, b = src.planes(), dst.planes()
        made = plan(a, b, src.page_size, dst.page_size, device)
        most = programs(src, dst, device)
        _pairs.hold((id(a[0]), id(b[0])), (made, src.num_slots, dst.num_slots, src.num_layers, most), a[0], b[0])
        again(src, dst, src_slots, dst_slots, layers)


def again(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: range | None) -> bool:
    """`rows`, if it was called for these pools before; whether it was. A plane is of one pool: the rest follows."""
    found = _pairs.get((id(src.planes()[0]), id(dst.planes()[0])))
    if found is None:
        return False
    made, src_size, dst_size, every, most = found
    first, number = (0, every) if layers is None else (layers.start, len(layers))
    made.run(src_slots, dst_slots, src_size, dst_size, first, number, every, most)
    return True


def _need_pinned(src: KVPool, dst: KVPool) -> None:
    for name, pool in (("src", src), ("dst", dst)):
        if pool.device.type == "cpu" and not pool.pinned and launch.lane() == "device":
            raise ArgumentError(
                "kv_transfer",
                name,
                "pinned host memory for method 'kernel' (KVPool.host_like makes it), or method "
                "'direct' with slots on the CPU",
                f"{pool}, pageable",
            )


class Tables:
    """Addresses that kernels read, on the device, for as long as a plan lives: or a launch on another stream."""

    def __init__(self, device: torch.device, *tables: list[int]) -> None:
        self.tensors = [upload(torch.tensor(t, dtype=torch.int64, device="cpu"), device) for t in tables]
        self.index = self.tensors[0].get_device()
        self.stream = launch._stream(self.index) if self.index >= 0 else 0

    def use(self) -> None:
        """Before each launch: the memory goes back to the stream that it came from, which must wait for others."""
        if self.index < 0 or launch._stream(self.index) == self.stream:
            return
        if not torch.cuda.is_current_stream_capturing():  # a graph's plan is never given up
            for t in self.tensors:
                t.record_stream(torch.cuda.current_stream(self.index))


class Plan:
    """A copy between two descriptions: everything but the slots, decided once."""

    def __init__(
        self, src: tuple[Plane, ...], dst: tuple[Plane, ...], src_page: int, dst_page: int, device: torch.device
    ) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise HalError(
                "hal: kv_transfer: the first transfer between two pools can't be captured; run it once before, "
                "or call hal.warmup"
            )
        self.index = (
            -1 if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
        )
        alike = len(src) == 1 or all(_strides(side[0]) == _strides(side[1]) for side in (src, dst))
        groups = [(src, dst)] if alike else [((a,), (b,)) for a, b in zip(src, dst, strict=True)]
        self.groups = [_Group(a, b, src_page, dst_page, device) for a, b in groups if a[0].row_bytes]

    def run(
        self,
        src_slots: Tensor,
        dst_slots: Tensor,
        src_size: int,
        dst_size: int,
        first: int,
        number: int,
        num_layers: int,
        count: int,
    ) -> None:
        """Layers `first` to ``first + number`` of pools of so many slots and layers, by `count` programs at most."""
        n = src_slots.shape[0]
        stream = launch._stream(self.index) if self.index >= 0 else 0
        if stream and torch.cuda.is_current_stream_capturing():  # 0, the default one, never is
            _in_graphs.add(self)
        for g in self.groups:
            if stream != g.tables.stream:
                g.tables.use()
            most = MOST_ROWS // (g.halves * number * g.chunks)
            for i in range(0, n, most):
                a, b = (src_slots, dst_slots) if n <= most else (src_slots[i : i + most], dst_slots[i : i + most])
                _launches.start(
                    a, b, g.src_bases, g.dst_bases, g.number, first, number, num_layers, src_size, dst_size, count
                )


class _Group:
    """Halves (k and v) that one launch copies."""

    def __init__(
        self, src: tuple[Plane, ...], dst: tuple[Plane, ...], src_page: int, dst_page: int, device: torch.device
    ) -> None:
        a, b = src[0], dst[0]
        self.halves = len(src)
        self.chunks, chunk_bytes = max((a.chunks, a.chunk_bytes), (b.chunks, b.chunk_bytes))
        strides, pages, align = [], [], 16
        for p, page in ((a, src_page), (b, dst_page)):
            seamless = p.page_stride == page * p.token_stride
            pages.append(1 if seamless else page)
            chunk = p.chunk_stride if p.chunks == self.chunks else chunk_bytes
            strides += [p.token_stride if seamless else p.page_stride, p.token_stride, chunk]
        for number in (chunk_bytes, *strides, *(base for p in (*src, *dst) for base in p.bases)):
            align = min(align, number & -number) if number else align
        self.strides = tuple(strides)
        word = min(align, 8)
        words = chunk_bytes // word
        together = any(len(p.bases) > 1 and abs(p.bases[1] - p.bases[0]) < p.token_stride for p in (a, b))
        on = pdl(device.index if device.index is not None else -1)
        self.rows = max(1, min(64, TILE_BYTES // (next_power_of_2(words) * word)))
        self.launch = copy_rows_kernel.bind(
            SRC_PAGE=pages[0],
            DST_PAGE=pages[1],
            CHUNKS=self.chunks,
            WORDS=words,
            WORD={8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word],
            ALIGN=align,
            ORDER=CHUNK_OUTER if self.chunks > 1 else UNIT_INNER if together else PAIR_INNER,
            ROWS=self.rows,
            PDL=on,
            num_warps=WARPS,
            launch_pdl=on,
        )
        self.tables = Tables(device, *([base for p in side for base in p.bases] for side in (src, dst)))
        self.src_bases, self.dst_bases = self.tables.tensors
        self.number = next(_numbers)
        _groups[self.number] = self


_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, _Group] = weakref.WeakValueDictionary()
"""By numbers of their own, never given twice: a kind of call is known by its group's."""


@kinds.plans
def _launches(
    src_slots: Tensor,
    dst_slots: Tensor,
    src_bases: Tensor,
    dst_bases: Tensor,
    group: int,
    first: int,
    number: int,
    num_layers: int,
    src_size: int,
    dst_size: int,
    count: int,
) -> kinds.Plan:
    g = _groups[group]
    units = g.halves * number
    args = (
        "src_slots",
        "dst_slots",
        "src_bases",
        "dst_bases",
        kinds.length("src_slots"),
        units,
        first,
        number,
        num_layers,
        src_size,
        dst_size,
        *g.strides,
    )
    tiles = kinds.length("src_slots", by=units * g.chunks, per=g.rows)
    few = count * g.rows // (units * g.chunks)
    return kinds.Plan(
        (
            kinds.Step(g.launch, tiles, args, (("src_slots", 0, few),)),
            kinds.Step(g.launch, kinds.Size(count), args, (("src_slots", few, MOST_ROWS),)),
        )
    )


_plans: Plans[Plan] = Plans(256)
_pairs: Plans[tuple[Plan, int, int, int, int]] = Plans(256)
"""Of pools that rows have gone between: their plan, slots of both, layers, programs."""
_in_graphs: set[Plan] = set()
"""A graph that is replayed reads the plan's tables: those must outlive the cache."""


def plan(src: tuple[Plane, ...], dst: tuple[Plane, ...], src_page: int, dst_page: int, device: torch.device) -> Plan:
    """Kept by the identity of the pools' planes, for as long as they live."""
    key = (id(src[0]), id(dst[0]), src_page, dst_page, device)
    found = _plans.get(key)
    if found is None:
        found = _plans.hold(key, Plan(src, dst, src_page, dst_page, device), src[0], dst[0])
    return found


def _strides(p: Plane) -> tuple[int, ...]:
    return p.page_stride, p.token_stride, p.chunks, p.chunk_stride, p.chunk_bytes
