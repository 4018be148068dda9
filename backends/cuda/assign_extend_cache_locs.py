"""assign_extend_cache_locs: the slots of all new tokens, request after request, in one flat tensor.

Work is split by output: a program owns some chunks of `out`, whatever requests fall into them, so one
long row is spread over the device as well as thousands of short ones. It scans the lengths up to its
chunk, and from chunk to chunk goes on where it stopped; with the number of programs bounded, the cost is
linear in the requests and in the output.

Inside a chunk no request is searched for. Let ``end[j]`` be the running sum of lengths: the request
of output o is the number of ends <= o, that is a histogram of the ends in the chunk, summed up; and o's
run began at the last end <= o, a running maximum.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal import launch
from hal.backends.cuda._device import multiprocessors, pdl

BLOCK = 512
REQUESTS = 512


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@launch.jit(
    do_not_specialize=(
        "table", "requests", "starts", "ends", "out", "bs", "rows", "width", "stride", "size", "chunks",
    )
)  # fmt: skip
def assign_kernel(
    table, requests, starts, ends, out,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, chunks: tl.int64,
    PDL: tl.constexpr, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    programs = tl.num_programs(0)
    per_program = (chunks + programs - 1) // programs
    chunk = tl.program_id(0) * per_program
    last = tl.minimum(chunk + per_program, chunks)
    # The last block of requests that was looked at, and the tokens of all requests before it.
    block = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    while chunk < last:
        low = chunk * BLOCK
        high = tl.minimum(low + BLOCK, size)
        begun = tl.zeros([BLOCK], tl.int32)
        first = block
        run = before
        at = block
        total = before
        while (at < bs) & (total < high):
            j = at + tl.arange(0, REQUESTS)
            start = tl.load(starts + j, j < bs, other=0).to(tl.int64)
            end = tl.load(ends + j, j < bs, other=0).to(tl.int64)
            # As unsigned, the difference of any two int64 is right; clamped, no sum of them can wrap.
            length = tl.where(end > start, (end - start).to(tl.uint64), 0)
            length = tl.minimum(length, size.to(tl.uint64)).to(tl.int64)
            ending = total + tl.cumsum(length, 0)
            done = (ending <= low) & (j < bs)
            first += tl.sum(done.to(tl.int64), 0)
            run = tl.maximum(run, tl.max(tl.where(done, ending, 0), 0))
            inside = (ending > low) & (ending < high) & (j < bs)
            begun += tl.histogram(tl.where(inside, ending - low, 0).to(tl.int32), BLOCK, mask=inside)
            block = at
            before = total
            total += tl.sum(length, 0)
            at += REQUESTS
        o = low + tl.arange(0, BLOCK)
        request_at = first + tl.cumsum(begun, 0)
        run_began = tl.associative_scan(tl.where(begun > 0, o, run), 0, _larger)
        valid = (o < high) & (o < total)
        request = tl.load(requests + request_at, valid, other=-1).to(tl.int64)
        start = tl.load(starts + request_at, valid, other=0).to(tl.int64)
        t = o - run_began
        valid = valid & (request >= 0) & (request < rows) & (start >= -t) & (start < width - t)
        column = tl.where(valid, start, 0) + tl.where(valid, t, 0)
        slot = tl.load(table + tl.where(valid, request, 0) * stride + column, valid, other=-1)
        tl.store(out + o, slot.to(out.dtype.element_ty), o < high)
        chunk += 1


class _Launches(dict[int, tuple[launch.Launch, int]]):
    def __missing__(self, device: int) -> tuple[launch.Launch, int]:
        on = pdl(device)
        bound = assign_kernel.bind(PDL=on, BLOCK=BLOCK, REQUESTS=REQUESTS, num_warps=4, launch_pdl=on)
        self[device] = bound, 4 * multiprocessors(device)
        return self[device]


_launches: _Launches = launch.keeps(_Launches())


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
) -> Tensor:
    size = out.numel()
    if size:
        rows, width = req_to_token.shape
        run, programs = _launches[out.get_device()]
        chunks = (size + BLOCK - 1) // BLOCK
        run.start(
            (chunks if chunks < programs else programs, 1, 1),
            req_to_token, req_pool_indices, start_offsets, end_offsets, out,
            req_pool_indices.numel(), rows, width, req_to_token.stride(0), size, chunks,
        )  # fmt: skip
    return out


def supports(sig: object) -> None:
    """Every call of the contract."""
