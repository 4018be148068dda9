"""The tables of MLA decode: rows of 576 shared by all query heads, beside FlashInfer's own kernels and vLLM's builds of
FlashAttention 3 and FlashMLA; one query token a request, or a few, as where drafts are verified: extend_attention.

At the shapes of DeepSeek-V3 and of a rank of eight: device microseconds by implementation, ours over each peer's, and
what bytes and products cost at least at `COPY` and `PRODUCTS`. Pages of 64, spread over a pool. Ours is compared with
float64, by the bound of the conformance suite, before anything is timed, and peers with ours. They are planned
beforehand; ours has no plan. Over fp8 rows the peer is FlashMLA, by queries and weights of fp8: no result of the
contract, and compared by the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hal.bench import OURS, Row, launcher, peers
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import TOLERANCE, table_of, time_row
from hal.bench.cuda.pages import SPLITS
from hal.bench.judge import headroom, rows_at, truth_of
from hal.ops.spec import FP8

PAGE = 64
LEAST_PAGES = 4096
"""Of a pool."""
FP8_QUERIES = "vllm flashmla, fp8 queries"
POINTS = (
    (128, 1, 4096),
    (128, 1, 32768),
    (128, 16, 4096),
    (128, 64, 4096),
    (128, 128, 2048),
    (128, 34, 4096),
    (128, 40, 3000),
    (128, 70, 4096),
    (128, 80, 3000),
    (64, 64, 4096),
    (64, 80, 3000),
    (16, 1, 1024),
    (16, 1, 4096),
    (16, 16, 4096),
    (16, 64, 4096),
    (16, 140, 2048),
)
"""(query heads, bs, keys each); also of batches that are no whole fraction of the programs that run at once."""
MIXED: tuple[inputs.Runs, ...] = (
    ((1, 8192), (127, 128)),
    ((127, 128), (1, 8192)),
    ((120, 128), (8, 2048)),
    ((16, 128), (16, 512), (16, 1024), (16, 4096)),
    ((31, 700), (29, 2300), (30, 4600)),
)
"""Keys of requests that differ: a long one first or last, some, a mixture; over either cache, of `MIXED_OF` heads."""
MIXED_OF = (128, 16)
EXTEND_POINTS = (
    (128, 32, 4096, 2),
    (128, 32, 4096, 4),
    (128, 34, 4096, 2),
    (128, 40, 3000, 2),
    (128, 70, 4096, 2),
    (16, 32, 4096, 2),
    (16, 32, 4096, 4),
    (16, 140, 2048, 2),
)
"""(query heads, bs, keys each, query tokens each); also of batches that fill no whole wave."""
FP8_POINTS = (
    (128, 1, 4096),
    (128, 16, 4096),
    (128, 64, 4096),
    (128, 40, 3000),
    (128, 70, 4096),
    (16, 1, 4096),
    (16, 16, 4096),
    (16, 64, 4096),
    (16, 140, 2048),
)
FP8_EXTEND_POINTS = ((128, 32, 4096, 2), (128, 34, 4096, 2), (16, 32, 4096, 2), (16, 140, 2048, 2))
"""The same over e4m3."""
COPY = 4.25e6
"""Bytes a microsecond that a device-to-device copy moves on an H200."""
PRODUCTS = 790e6
"""FLOPs a microsecond of a bf16 matrix product there."""


class Inputs:
    """One batch, its pages spread over a pool; `sets` batches of slots of one pool, so that none is in the cache.
    `tokens`: queries a request; 0: one, of a call of decode_attention. Over fp8 queries have values of fp8."""

    def __init__(
        self,
        heads: int,
        bs: int,
        keys: inputs.Keys,
        tokens: int = 0,
        sets: int = 4,
        cache: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        self.lens = inputs.lens_of(bs, keys)
        pages = -(-max(self.lens) // PAGE)
        pool = max(bs * pages * sets, LEAST_PAGES)
        self.bs, self.heads, self.scale = bs, heads, 192**-0.5
        bf16, i32 = torch.bfloat16, torch.int32
        self.tokens = tokens
        n = bs * max(tokens, 1)
        self.q = torch.randn(n, heads, 576, device=inputs.DEVICE, dtype=bf16).to(cache).to(bf16)
        self.rows = torch.randn(pool, PAGE, 1, 576, device=inputs.DEVICE, dtype=bf16).to(cache)
        self.tables = (
            torch.randperm(pool, device=inputs.DEVICE, dtype=torch.int64)[: sets * bs * pages]
            .view(sets, bs, pages)
            .to(i32)
        )
        each = torch.arange(PAGE, device=inputs.DEVICE, dtype=i32)
        slots = self.tables[..., None] * PAGE + each
        slots = slots.view(sets, bs, -1)
        self.slots = torch.cat([slots[:, i, :n] for i, n in enumerate(self.lens)], 1)
        self.indptr = torch.tensor([0, *accumulate(self.lens)], device=inputs.DEVICE, dtype=i32)
        self.seqlens = torch.tensor(self.lens, device=inputs.DEVICE, dtype=i32)
        self.starts = torch.arange(bs + 1, device=inputs.DEVICE, dtype=i32) * max(tokens, 1)
        self.out = torch.empty(n, heads, 512, device=inputs.DEVICE, dtype=bf16)

    def ours(self) -> Callable[[int], Tensor]:
        run = launcher("cuda", "extend_attention" if self.tokens else "decode_attention")
        given = (self.q, self.rows, self.rows[..., :512], *([self.starts] if self.tokens else []), self.indptr)
        return lambda i: run(*given, self.slots[i], self.out, scale=self.scale)

    def flashinfer(self) -> dict[str, Callable[[int], Tensor]]:
        flashinfer = peers.flashinfer()
        if flashinfer is None or self.rows.dtype in FP8:
            return {}
        made: dict[str, Callable[[int], Tensor]] = {}
        pages = [-(-n // PAGE) for n in self.lens]
        starts = torch.tensor([0, *accumulate(pages)], device=inputs.DEVICE, dtype=torch.int32)
        latent, rotated = self.rows[:, :, 0, :512], self.rows[:, :, 0, 512:]
        for backend in ("fa2", "fa3"):
            wrappers = []
            for table in self.tables:
                scratch = torch.empty(128 << 20, device=inputs.DEVICE, dtype=torch.uint8)
                wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=backend)
                wrapper.plan(
                    self.starts,
                    starts,
                    torch.cat([mine[:n] for mine, n in zip(table, pages, strict=True)]),
                    self.seqlens,
                    self.heads,
                    512,
                    64,
                    PAGE,
                    self.tokens > 0,
                    self.scale,
                    torch.bfloat16,
                    torch.bfloat16,
                )
                wrappers.append(wrapper)
            made[f"flashinfer {backend}"] = (
                lambda i, w=wrappers: w[i].run(  # type: ignore[misc]
                    self.q[..., :512], self.q[..., 512:], latent, rotated
                )
            )
        return made

    def vllm_fa3(self) -> dict[str, Callable[[int], Tensor]]:
        """vLLM's build of FA3 as its engine decodes MLA by it: rotated parts as queries and keys, the rest beside."""
        module = peers.vllm_fa3()
        if module is None or self.rows.dtype in FP8:
            return {}
        same: dict[str, Any] = {"max_seqlen_q": max(self.tokens, 1), "max_seqlen_k": max(self.lens), "causal": True}
        same |= {"cu_seqlens_q": self.starts, "num_splits": SPLITS}
        plans = [
            module.get_scheduler_metadata(
                batch_size=self.bs, num_heads_q=self.heads, num_heads_kv=1, headdim=64, headdim_v=512,
                cache_seqlens=self.seqlens, qkv_dtype=self.q.dtype, page_size=PAGE, **same,
            )
            for _ in self.tables
        ]  # fmt: skip
        call = partial(
            module.flash_attn_varlen_func, self.q[..., 512:], self.rows[..., 512:], self.rows[..., :512],
            q_v=self.q[..., :512], seqused_k=self.seqlens, softmax_scale=self.scale, fa_version=3, **same,
        )  # fmt: skip
        return {"vllm fa3": lambda i: call(block_table=self.tables[i], scheduler_metadata=plans[i], out=self.out)}

    def flashmla(self) -> dict[str, Callable[[int], Tensor]]:
        q = self.q.view(self.bs, max(self.tokens, 1), self.heads, 576)
        if self.rows.dtype in FP8:
            return self._flashmla_fp8(q.to(self.rows.dtype))
        run = peers.flashmla()
        if run is None:
            return {}
        given = [(q, self.rows, 512, self.seqlens, table, self.scale, self.tokens > 0) for table in self.tables]
        plans = [run(*x, None, None, None)[2:] for x in given]
        return {"vllm flashmla": lambda i: run(*given[i], *plans[i], None)[0].view(self.out.shape)}

    def check(self, out: Tensor) -> float:
        """The largest error of the first and the last request, in units of the bound.

        Raises:
            AssertionError: it is outside of the bound.
        """
        each, worst = max(self.tokens, 1), 0.0
        for i in sorted({0, self.bs - 1}):
            n, rows = self.lens[i], slice(i * each, (i + 1) * each)
            position = torch.arange(n - each, n, device=inputs.DEVICE, dtype=torch.int64)
            k = rows_at(self.rows, self.slots[0, sum(self.lens[:i]) :][:n])
            worst = max(worst, headroom(i, out[rows], *truth_of(self.q[rows], k, k[..., :512], self.scale, position)))
        return worst

    def _flashmla_fp8(self, q: Tensor) -> dict[str, Callable[[int], Tensor]]:
        module = peers.flashmla_fp8()
        if module is None:
            return {}
        plan = module.get_mla_decoding_metadata_dense_fp8(self.seqlens, q.shape[1] * self.heads, 1)
        one = torch.ones(1, device=inputs.DEVICE, dtype=torch.float32)
        given = (self.scale, self.tokens > 0, *plan, one, one)
        run = module.fwd_kvcache_mla_fp8
        return {
            FP8_QUERIES: lambda i: run(q, self.rows, 512, self.seqlens, self.tables[i], *given)[0].view(self.out.shape)
        }


def _mla_row(op: str, cache: torch.dtype, heads: int, bs: int, keys: inputs.Keys, rounds: int, tokens: int = 0) -> Row:
    x = Inputs(heads, bs, keys, tokens, cache=cache)
    calls = {OURS: x.ours(), **x.flashinfer(), **x.vllm_fa3(), **x.flashmla()}
    want = calls[OURS](0).float()
    room: dict[str, float] = {}

    def check(name: str, call: Callable[[], Any]) -> None:
        found = call()
        found = found[0] if isinstance(found, tuple) else found
        if name == OURS:
            room[OURS] = x.check(found)
        off = found.float() - want
        if name == FP8_QUERIES:
            far, most = float(off.norm() / want.norm()), TOLERANCE[cache]
        else:
            far, most = float(off.abs().max() / want.abs().max()), 0.02
        if not far < most:
            raise AssertionError(f"{name} differs from ours by {far:.2g}")

    row = time_row(
        {
            "op": op,
            "cache": str(cache).removeprefix("torch."),
            "heads": heads,
            "bs": bs,
            "keys": inputs.told(keys),
            **({"tokens": tokens} if tokens else {}),
        },
        {name: partial(lambda call: call, call) for name, call in calls.items()},
        len(x.tables),
        check,
        per_graph=24 if sum(x.lens) > 100_000 else 48,
        rounds=rounds,
        host=120,
        host_of=(OURS,),
    )
    row["headroom"] = room
    if us := row.get("device_us", {}).get(OURS):
        row["ratio"] = {name: us / t for name, t in row["device_us"].items() if name != OURS}
    row["least_us"] = {
        "bytes": sum(x.lens) * 576 * cache.itemsize / COPY,
        "flops": 2 * max(tokens, 1) * sum(x.lens) * heads * 1088 / PRODUCTS,
    }
    return row


def _rows(op: str, quick: bool, bf16: tuple[Any, ...], e4m3: tuple[Any, ...]) -> list[Row]:
    """Rows of points of both caches."""
    cases = [(torch.bfloat16, point) for point in (bf16[:1] if quick else bf16)]
    cases += [(torch.float8_e4m3fn, point) for point in (e4m3[:1] if quick else e4m3)]
    names = ("heads", "bs", "keys", "tokens")
    return table_of(
        partial(_mla_row, op=op, cache=cache, rounds=3 if quick else 25, **dict(zip(names, point, strict=False)))
        for cache, point in cases
    )


def mla_decode_attention(quick: bool = False) -> list[Row]:
    """Rows: the cache's dtype, query heads, bs, keys each; then `MIXED`, over either cache."""
    mixed = tuple((heads, inputs.requests(keys), keys) for heads in MIXED_OF for keys in MIXED)
    return _rows("decode_attention", quick, POINTS + mixed, FP8_POINTS + mixed)


def mla_extend_attention(quick: bool = False) -> list[Row]:
    """Rows: the cache's dtype, query heads, bs, keys each, query tokens each."""
    points = ((16, 1, 128, 2),) if quick else EXTEND_POINTS
    return _rows("extend_attention", quick, points, points if quick else FP8_EXTEND_POINTS)


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "mla_decode_attention": mla_decode_attention,
    "mla_extend_attention": mla_extend_attention,
}
