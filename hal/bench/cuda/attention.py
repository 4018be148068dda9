# mypy: disable-error-code="no-untyped-call, unused-ignore"
# torch has untyped functions.
"""The tables of attention over pages: decode and extend beside FlashInfer, FA3 and contiguous SDPA.

Outputs are compared with float64, by the bound of the conformance suite, before anything is timed. Ours reads random
pages of 16 by their slots; FA3 and FlashInfer read the same pages by a page table; SDPA is given the same keys
contiguously, which no engine has. FA3 reads fp8 only by queries of fp8, and makes its weights fp8: no result of the
contract, and judged by the norm of its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal import _host
from hal.bench import OURS, Row, launcher, peers
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import TOLERANCE, table_of, time_row
from hal.bench.judge import headroom, rows_at, truth_of
from hal.ops.spec import FP8

PAGE = 16
HEADS = (32, 8, 128)
"""Llama-3-8B: query heads, key/value heads, head_dim."""
LEAST_PAGES = 8192
"""Of a pool."""
SPLITS = 32
"""Parts of a request that vLLM has FA3 make at most, where its steps are graphs."""
FP8_QUERIES = "vllm fa3, fp8 queries"
DECODE = ((1, 4096, 1.42), (1, 32768, 1.15), (16, 4096, 1.11), (64, 4096, 1.08), (128, 2048, 1.12), (256, 1024, 1.20))
"""(bs, keys each, what of contiguous SDPA's time FA3 takes there: ours must take no more)."""
EXTEND = ((1, 4096, 0), (4, 1024, 4096), (8, 256, 1024))
"""(bs, new tokens each, prefix each)."""
SHORT = ((16, 300, 700), (40, 100, 400), (64, 64, 960), (128, 17, 500), (300, 5, 100), (512, 4, 200))
"""The same, of many requests with few new tokens: chunks beside each other, hits of a prefix cache."""
MANY = ((64, 128), (256, 128), (300, 101), (512, 512), (1024, 256))
"""(bs, keys each): decode of many short requests."""
ONE_LONG = ((1, 8192), (255, 128))
"""Runs of keys: a long request among short ones."""
EVERY = ((32, 128), (32, 512), (32, 1024), (32, 4096))
"""A mixture of them."""
MIXED = (ONE_LONG, ONE_LONG[::-1], ((248, 128), (8, 2048)), ((1, 2000), (400, 100)), EVERY)
"""Keys of requests that differ, as an engine's do: a long one first or last, some, a mixture."""
UNEVEN = ((70, 4096), (80, 3000))
"""(bs, keys each): decode of batches that fill no whole wave of the programs that run at once."""
SPREAD = ((8, 600), (8, 4400), (8, 1500), (8, 3200), (8, 2300), (8, 5000))
"""The same, of requests that differ."""
MIXED_EXTEND = (
    *((4, keys) for keys in (ONE_LONG, ONE_LONG[::-1], ((31, 512), (1, 16384)), EVERY)),
    (16, ((120, 128), (8, 2048))),
    (64, ((1, 8192), (63, 512))),
    (128, ((1, 16384), (31, 256))),
    (256, ((28, 512), (4, 4096))),
)
"""(new tokens each, keys each with them) of such requests."""
FEW = ((1, 4, 4092), (1, 4, 8188), (1, 4, 32764), (1, 16, 8176), (8, 4, 4092), (1, 64, 8128), (1, 256, 7936))
"""The same, of few requests with few tokens behind many: drafts to verify, a turn of a conversation."""
OVER_FP8 = (
    *((HEADS, *case) for case in ((1, 4, 8188), (8, 4, 4092), (32, 4, 4092), (8, 8, 4088))),
    *(((16, 8, 256), *case) for case in ((8, 4, 4092), (1, 4096, 0))),
)
"""Heads, then the same, over e4m3."""
FP8_DECODE = ((64, 4096), (256, 1024), (16, 4096), (1, 4096), (1, 1024), (1, 8192), (32, 1024))
"""(bs, keys each)."""
BEYOND = (
    *((HEADS, torch.bfloat16, *case) for case in MANY),
    *((HEADS, torch.bfloat16, *case) for case in UNEVEN),
    *((HEADS, torch.bfloat16, inputs.requests(keys), keys) for keys in (*MIXED, SPREAD)),
    *((HEADS, torch.float8_e4m3fn, *case) for case in FP8_DECODE + MANY + UNEVEN),
    *((HEADS, torch.float8_e4m3fn, inputs.requests(keys), keys) for keys in (*MIXED, SPREAD)),
    (HEADS, torch.float8_e5m2, 64, 4096),
    *(((32, 4, 128), torch.bfloat16, *case) for case in ((64, 4096), (1, 4096), *UNEVEN)),
    ((32, 4, 128), torch.bfloat16, inputs.requests(SPREAD), SPREAD),
    *(((64, 8, 128), torch.bfloat16, *case) for case in ((64, 4096), (1, 4096), *UNEVEN[:1], (40, 3000))),
    ((8, 1, 128), torch.bfloat16, 300, 2000),
    *(((32, 8, 64), torch.bfloat16, *case) for case in ((64, 4096), (110, 3000))),
    *(((16, 8, 256), torch.bfloat16, *case) for case in ((64, 4096), (20, 4096), (16, 4096), (1, 4096), (1, 1024))),
)
"""Heads, the cache's dtype, bs, keys each: decode of short requests, of uneven batches and of requests that differ,
over fp8, with eight query heads a group, and with heads of 64 and 256."""
HOPPER = (
    ((32, 8, 128, 128), *EXTEND, (64, 4, 4092), (1, 64, 0)),
    ((64, 8, 64, 64), *EXTEND[::2]),
    ((16, 8, 256, 256), *EXTEND[::2]),
    ((128, 128, 192, 128), (1, 2048, 0)),
    ((28, 4, 128, 128), EXTEND[1]),
)
"""Query heads, key/value heads, head_dim, v_head_dim; then as EXTEND."""
PROMPTS = (
    ((16, 16, 192, 128), (1, 4096, 0), (1, 16384, 0), (1, 16384, 16384), (4, 1024, 0)),
    ((128, 128, 192, 128), (1, 4096, 0)),
)
"""The same, of DeepSeek's prompts, whose keys were made for the call and lie one behind the other."""


class Inputs:
    """One batch, its pages spread over a pool, or one behind the other."""

    def __init__(
        self,
        bs: int,
        new: int,
        keys: inputs.Keys,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        heads: tuple[int, int, int, int] = (*HEADS, HEADS[2]),
        cache: torch.dtype | None = None,
        in_order: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        hq, hk, d, dv = self.heads = heads
        self.lens = inputs.lens_of(bs, keys)
        self.keys = max(self.lens)
        pages = -(-self.keys // PAGE)
        pool = max(bs * pages, LEAST_PAGES)
        self.bs, self.new, self.scale = bs, new, d**-0.5
        self.q = torch.randn(bs * new, hq, d, device=inputs.DEVICE, dtype=dtype)
        self.k_cache, self.v_cache = (
            torch.randn(pool, PAGE, hk, x, device=inputs.DEVICE, dtype=dtype).to(cache or dtype) for x in (d, dv)
        )
        self.fp8 = self.k_cache.dtype in FP8
        order = (torch.arange if in_order else torch.randperm)(pool, device=inputs.DEVICE, dtype=torch.int64)
        self.table = order[: bs * pages].view(bs, pages).int()
        slots = self.table.view(bs, pages, 1) * PAGE + torch.arange(PAGE, device=inputs.DEVICE, dtype=torch.int32)
        self.slots = torch.cat([mine[:n] for mine, n in zip(slots.view(bs, -1), self.lens, strict=True)])
        self.starts = list(accumulate(self.lens, initial=0))
        self.kv_indptr = torch.tensor(self.starts, device=inputs.DEVICE, dtype=torch.int32)
        self.qo_indptr = torch.arange(bs + 1, device=inputs.DEVICE, dtype=torch.int32) * new
        self.seqlens = torch.tensor(self.lens, device=inputs.DEVICE, dtype=torch.int32)
        self.out = torch.empty(bs * new, hq, dv, device=inputs.DEVICE, dtype=dtype)
        self.lse = torch.empty(bs * new, hq, device=inputs.DEVICE, dtype=torch.float32)

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """k and v ``[bs, kv_heads, keys, head_dim]``, of requests that are alike."""
        found = [rows_at(c, self.slots) for c in (self.k_cache, self.v_cache)]
        k, v = (x.view(self.bs, self.keys, *x.shape[1:]).transpose(1, 2).contiguous() for x in found)
        return k, v

    def ours(self, **more: Any) -> Callable[[], Tensor]:
        """The call of hal; `more`: keywords beside scale."""
        decode = self.new == 1
        lengths = (self.kv_indptr,) if decode else (self.qo_indptr, self.kv_indptr)
        return partial(
            launcher("cuda", "decode_attention" if decode else "extend_attention"),
            self.q,
            self.k_cache,
            self.v_cache,
            *lengths,
            self.slots,
            self.out,
            self.lse,
            scale=self.scale,
            **more,
        )

    def peers(self) -> dict[str, Callable[[], Tensor]]:
        found = {"fa3": self.fa3(), **self.vllm_fa3(), **self.flashinfer(), "sdpa contiguous": self.sdpa()}
        return {name: call for name, call in found.items() if call is not None}

    def fa3(self) -> Callable[[], Tensor] | None:
        fn = peers.fa3()
        if fn is None or self.fp8:
            return None
        q = self.q.view(self.bs, self.new, *self.q.shape[1:])

        def call() -> Tensor:
            found = fn(
                q,
                self.k_cache,
                self.v_cache,
                cache_seqlens=self.seqlens,
                page_table=self.table,
                softmax_scale=self.scale,
                causal=True,
            )
            result: Tensor = found[0] if isinstance(found, tuple) else found
            return result.view(self.q.shape)

        return call

    def vllm_fa3(self) -> dict[str, Callable[[], Tensor]]:
        """vLLM's build of FA3 as its engine calls it, planned beforehand. Over fp8 the queries are fp8 too; what rounds
        them is not in the times."""
        module = peers.vllm_fa3()
        if module is None or self.k_cache.dtype not in (self.q.dtype, torch.float8_e4m3fn):
            return {}
        hq, hk, d, _ = self.heads
        q = self.q.to(self.k_cache.dtype)
        # Of 64 tokens, rounds with so many parts did not end on an H100.
        splits = SPLITS if self.new == 1 or (self.new <= 16 and self.bs <= 8) else 1
        same = {"max_seqlen_q": self.new, "max_seqlen_k": self.keys, "cu_seqlens_q": self.qo_indptr, "causal": True}
        same |= {"num_splits": splits}
        plan = module.get_scheduler_metadata(
            batch_size=self.bs, num_heads_q=hq, num_heads_kv=hk, headdim=d, cache_seqlens=self.seqlens,
            qkv_dtype=q.dtype, page_size=PAGE, **same,
        )  # fmt: skip
        scales = {}
        if self.fp8:
            one = torch.ones(self.bs, hk, device=inputs.DEVICE, dtype=torch.float32)
            scales = {"q_descale": one, "k_descale": one, "v_descale": one}
        call = partial(
            module.flash_attn_varlen_func, q, self.k_cache, self.v_cache, seqused_k=self.seqlens,
            block_table=self.table, softmax_scale=self.scale, out=self.out, scheduler_metadata=plan, fa_version=3,
            **scales, **same,
        )  # fmt: skip
        return {FP8_QUERIES if self.fp8 else "vllm fa3": call}

    def flashinfer(self) -> dict[str, Callable[[], Tensor]]:
        """Its kernels for this batch, planned beforehand: what the host does for them is not in the times. Over fp8
        those of decode alone: its others have not been tried there."""
        flashinfer = peers.flashinfer()
        if flashinfer is None or (self.fp8 and self.new > 1):
            return {}
        hq, hk, d, _ = self.heads
        pages = [-(-n // PAGE) for n in self.lens]
        indptr = _host.tensor(list(accumulate(pages, initial=0)), dtype=torch.int32)
        table = torch.cat([mine[:n] for mine, n in zip(self.table, pages, strict=True)])
        last = _host.tensor([(n - 1) % PAGE + 1 for n in self.lens], dtype=torch.int32)
        same = {"sm_scale": self.scale, "q_data_type": self.q.dtype, "kv_data_type": self.k_cache.dtype}
        made: dict[str, Callable[[], Tensor]] = {}
        for backend in ("fa2",) if self.new == 1 else ("fa2", "fa3"):
            scratch = torch.zeros(256 << 20, dtype=torch.uint8, device=inputs.DEVICE)
            if self.new == 1:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    scratch, "NHD", use_tensor_cores=True, backend=backend
                )
                wrapper.plan(indptr, table, last, hq, hk, d, PAGE, **same)
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=backend)
                wrapper.plan(self.qo_indptr.cpu(), indptr, table, last, hq, hk, d, PAGE, causal=True, **same)

            def call(wrapper: Any = wrapper) -> Tensor:
                found: Tensor = wrapper.run(self.q, (self.k_cache, self.v_cache), out=self.out)
                return found

            made[f"flashinfer {backend}"] = call
        return made

    def vllm_fa3_contiguous(self) -> dict[str, Callable[[], Tensor]]:
        """vLLM's build of FA3 as its engine calls it in MLA's prompts: no pages."""
        module = peers.vllm_fa3()
        if module is None:
            return {}
        k, v = (rows_at(c, self.slots).contiguous() for c in (self.k_cache, self.v_cache))
        call = partial(
            module.flash_attn_varlen_func, self.q, k, v, max_seqlen_q=self.new, cu_seqlens_q=self.qo_indptr,
            max_seqlen_k=self.keys, cu_seqlens_k=self.kv_indptr, softmax_scale=self.scale, causal=True, fa_version=3,
        )  # fmt: skip
        return {"vllm fa3, contiguous": call}

    def sdpa(self) -> Callable[[], Tensor] | None:
        """Its output has the heads before the tokens. None where requests differ, or torch's causal mask, which is
        aligned to the first key, means something else."""
        if self.fp8 or len(set(self.lens)) > 1 or (self.new != 1 and self.new != self.keys):
            return None
        k, v = self.contiguous()
        q = self.q.view(self.bs, self.new, *self.q.shape[1:]).transpose(1, 2).contiguous()

        def call() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=self.new > 1, enable_gqa=True)

        return call

    def check(self, out: Tensor) -> float:
        """The largest error of the first and the last request's last tokens, and the longest's, in units of the bound.

        Raises:
            AssertionError: it is outside of the bound.
        """
        if out.ndim == 4:
            out = out.transpose(1, 2).reshape(self.q.shape)
        return max(headroom(i, out[rows], truth, slack) for i, rows, truth, slack in self._truths(self.q))

    def near(self, out: Tensor) -> None:
        """The same of what has rounded the queries to the cache's dtype, by the norm of its error.

        Raises:
            AssertionError: it is too far.
        """
        for i, rows, truth, _ in self._truths(self.q.to(self.k_cache.dtype)):
            far = float((out[rows].double() - truth).norm() / truth.norm())
            if not far <= TOLERANCE[self.k_cache.dtype]:
                raise AssertionError(f"request {i}: {far:.2g} of the norm away")

    def _truths(self, q: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """(request, rows of q, what attention of these is in float64, its slack)."""
        for i in sorted({0, self.bs - 1, self.lens.index(self.keys)}):
            mine = self.slots[self.starts[i] : self.starts[i + 1]]
            rows = torch.arange(
                (i + 1) * self.new - min(self.new, 8), (i + 1) * self.new, device=inputs.DEVICE, dtype=torch.int64
            )
            k, v = (rows_at(c, mine) for c in (self.k_cache, self.v_cache))
            position = self.lens[i] - (i + 1) * self.new + rows
            yield i, rows, *truth_of(rows_at(q[:, None], rows), k, v, self.scale, position)


def _attention_row(
    op: str,
    bs: int,
    new: int,
    keys: inputs.Keys,
    rounds: int,
    heads: tuple[int, int, int],
    cache: torch.dtype,
    target: float | None = None,
) -> Row:
    sets = [Inputs(bs, new, keys, seed=s, heads=(*heads, heads[2]), cache=cache) for s in range(2)]
    impls = {OURS: [x.ours() for x in sets]}
    for x in sets:
        for name, fn in x.peers().items():
            impls.setdefault(name, []).append(fn)
    room: dict[str, float] = {}

    def check(name: str, call: Callable[[], Tensor]) -> None:
        if name == FP8_QUERIES:
            sets[0].near(call())
        else:
            room[name] = sets[0].check(call())

    listed = sum(inputs.lens_of(bs, keys))
    work = new * (listed - bs * (new - 1) / 2)
    per_graph = max(2, min(48, int(2e5 / max(1.0, listed / 200 + work / 1e4))))
    row = time_row(
        {
            "op": op,
            "heads": "/".join(map(str, heads)),
            "cache": str(cache).removeprefix("torch."),
            "bs": bs,
            "new": new,
            "keys": inputs.told(keys),
        },
        {n: partial(_in_turn, fns) for n, fns in impls.items()},
        len(sets),
        check,
        per_graph=per_graph,
        rounds=rounds,
        host=300 if listed <= 1 << 16 else 0,
        host_of=(OURS,),
    )
    row["headroom"] = room
    if us := row.get("device_us", {}).get(OURS):
        q_heads, kv_heads, dim = heads
        row["ratio"] = {n: us / t for n, t in row["device_us"].items() if n != OURS}
        row["gbs"] = 2 * listed * kv_heads * dim * cache.itemsize / us / 1e3
        row["tflops"] = 4 * work * q_heads * dim / us / 1e6
    return row if target is None else {**row, "target": target}


def _in_turn(fns: list[Callable[[], Tensor]]) -> Callable[[int], Tensor]:
    return lambda i: fns[i]()


def _attention_rows(op: str, rounds: int, cases: list[tuple[Any, ...]]) -> list[Row]:
    """Rows of cases: heads, the cache's dtype, bs, new tokens each, keys each, target."""
    return table_of(
        partial(
            _attention_row, op=op, bs=bs, new=new, keys=keys, rounds=rounds, target=target, heads=heads, cache=cache
        )
        for heads, cache, bs, new, keys, target in cases
    )


def decode_attention(quick: bool = False) -> list[Row]:
    """Rows: batch; `target` is the ratio to SDPA that FA3 has. Then `BEYOND`."""
    some: list[tuple[Any, ...]] = [(HEADS, torch.bfloat16, *case) for case in (DECODE[::5] if quick else DECODE)]
    some += [] if quick else [(*case, None) for case in BEYOND]
    cases = [(heads, cache, bs, 1, keys, target) for heads, cache, bs, keys, target in some]
    return _attention_rows("decode_attention", 3 if quick else 25, cases)


def extend_attention(quick: bool = False) -> list[Row]:
    """Rows: batch; then `OVER_FP8`, and `MIXED_EXTEND` over either."""
    bf16 = EXTEND[-1:] if quick else EXTEND + SHORT + FEW
    some: list[tuple[Any, ...]] = [(HEADS, torch.bfloat16, *case) for case in bf16]
    some += [] if quick else [(heads, torch.float8_e4m3fn, *case) for heads, *case in OVER_FP8]
    cases: list[tuple[Any, ...]] = [
        (heads, cache, bs, new, new + prefix, None) for heads, cache, bs, new, prefix in some
    ]
    for cache in () if quick else (torch.bfloat16, torch.float8_e4m3fn):
        cases += [(HEADS, cache, inputs.requests(keys), new, keys, None) for new, keys in MIXED_EXTEND]
    return _attention_rows("extend_attention", 3 if quick else 15, cases)


def _hopper_row(
    heads: tuple[int, int, int, int], bs: int, new: int, keys: int, rounds: int, prompt: bool = False
) -> Row:
    x = Inputs(bs, new, keys, heads=heads, in_order=prompt)
    if prompt:
        ours, calls = OURS, {OURS: x.ours(), **x.vllm_fa3_contiguous()}
    else:
        # The kernel for Hopper takes no scale of a cache; the other multiplies by it once a tile of queries.
        ours, calls = "hopper", {"hopper": x.ours(), "triton": x.ours(k_scale=1.0)}
    room: dict[str, float] = {}

    def check(name: str, call: Callable[[], Tensor]) -> None:
        room[name] = x.check(call())

    row = time_row(
        {"op": "extend_attention", "heads": heads, "bs": bs, "new": new, "keys": keys},
        {n: partial(_in_turn, [call]) for n, call in calls.items()},
        1,
        check,
        per_graph=4,
        rounds=rounds,
        host=0,
    )
    row["headroom"] = room
    times = row.get("device_us", {})
    if us := times.get(ours):
        work = 4 * bs * new * (keys - (new - 1) / 2) * heads[0] * (heads[2] + heads[3]) / 2
        row["ratio"] = {n: us / t for n, t in times.items() if n != ours}
        row["tflops"] = work / us / 1e6
    return row


def _hopper_rows(cases: tuple[Any, ...], quick: bool, **more: Any) -> list[Row]:
    flat = [(heads, *case) for heads, *several in cases for case in several]
    return table_of(
        partial(_hopper_row, heads=heads, bs=bs, new=new, keys=new + prefix, rounds=3 if quick else 9, **more)
        for heads, bs, new, prefix in (flat[:1] if quick else flat)
    )


def extend_attention_hopper(quick: bool = False) -> list[Row]:
    """Rows: heads, batch, device microseconds of both kernels of `extend_attention`, in turn in one run; then `PROMPTS`
    beside FA3 over the same keys."""
    return _hopper_rows(HOPPER, quick) + ([] if quick else _hopper_rows(PROMPTS, quick, prompt=True))


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "decode_attention": decode_attention,
    "extend_attention": extend_attention,
    "extend_attention_hopper": extend_attention_hopper,
}
