# mypy: disable-error-code="no-untyped-call, unused-ignore"
# torch has untyped functions.
"""What attention over pages is measured with: a batch, our call on it and those of FlashInfer, FA3 and SDPA.

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
from hal.bench import launcher, peers
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import TOLERANCE
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
        window: int = -1,
        cap: float = 0.0,
    ) -> None:
        torch.manual_seed(seed)
        hq, hk, d, dv = self.heads = heads
        self.lens = inputs.lens_of(bs, keys)
        self.keys = max(self.lens)
        pages = -(-self.keys // PAGE)
        pool = max(bs * pages, LEAST_PAGES)
        self.bs, self.new, self.scale, self.window, self.cap = bs, new, d**-0.5, window, cap
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
        if self.window >= 0:
            more["sliding_window"] = self.window
        if self.cap:
            more["logit_cap"] = self.cap
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
        sees = (self.window, 0) if self.window >= 0 else (-1, -1)
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
                window_size=sees,
                softcap=self.cap,
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
        sees = [self.window, 0] if self.window >= 0 else [-1, -1]
        same |= {"num_splits": splits, "window_size": sees}
        plan = module.get_scheduler_metadata(
            batch_size=self.bs, num_heads_q=hq, num_heads_kv=hk, headdim=d, cache_seqlens=self.seqlens,
            qkv_dtype=q.dtype, page_size=PAGE, has_softcap=self.cap > 0, **same,
        )  # fmt: skip
        scales = {}
        if self.fp8:
            one = torch.ones(self.bs, hk, device=inputs.DEVICE, dtype=torch.float32)
            scales = {"q_descale": one, "k_descale": one, "v_descale": one}
        call = partial(
            module.flash_attn_varlen_func, q, self.k_cache, self.v_cache, seqused_k=self.seqlens,
            block_table=self.table, softmax_scale=self.scale, out=self.out, scheduler_metadata=plan, fa_version=3,
            softcap=self.cap, **scales, **same,
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
        same |= {"window_left": self.window, "logits_soft_cap": self.cap}
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
        if (
            self.fp8
            or self.window >= 0
            or self.cap
            or len(set(self.lens)) > 1
            or (self.new != 1 and self.new != self.keys)
        ):
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
            yield i, rows, *truth_of(rows_at(q[:, None], rows), k, v, self.scale, position, self.window, self.cap)
