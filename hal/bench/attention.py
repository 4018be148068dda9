"""The attention tables of ``docs/performance.md``, and all that a device has to say about the two kernels, in one file.

    python -m hal.bench.attention check     every sample of both contracts, judged by the oracles
    python -m hal.bench.attention decode    device and host time, beside FlashInfer, FA3 and contiguous SDPA
    python -m hal.bench.attention extend
    python -m hal.bench.attention hopper    extend's kernel for Hopper beside the Triton one, over heads
    python -m hal.bench.attention tune      decode and extend by tile, warps, stages, programs a multiprocessor

Each prints rows as JSON, a line each. Outputs are compared with float64, by the bound of the conformance suite, before
anything is timed. Ours reads random pages of 16 by their slots; FA3 and FlashInfer read the same pages by a page table;
SDPA is given the same keys contiguously, which no engine has.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal import _host, ops
from hal.bench.cuda import device_us, host_us
from hal.ops.proofs import judge as _judge
from hal.triton import launch

Row = dict[str, Any]
PAGE = 16
HEADS = (32, 8, 128)
"""Llama-3-8B: query heads, key/value heads, head_dim."""
DECODE = ((1, 4096), (1, 32768), (16, 4096), (64, 4096), (128, 2048), (256, 1024))
"""(bs, keys each)."""
DECODE_TARGET = (1.42, 1.15, 1.11, 1.08, 1.12, 1.20)
"""What of contiguous SDPA's time FA3 takes at these points: ours must take no more."""
EXTEND = ((1, 4096, 0), (4, 1024, 4096), (8, 256, 1024))
"""(bs, new tokens each, prefix each)."""
HOPPER = (
    ((32, 8, 128, 128), *EXTEND, (64, 4, 4092), (1, 64, 0)), ((64, 8, 64, 64), *EXTEND[::2]),
    ((16, 8, 256, 256), *EXTEND[::2]), ((128, 128, 192, 128), (1, 2048, 0)), ((28, 4, 128, 128), EXTEND[1]),
)  # fmt: skip
"""Query heads, key/value heads, head_dim, v_head_dim; then as EXTEND."""


class Inputs:
    """One batch, its pages spread over a pool."""

    def __init__(
        self,
        bs: int,
        new: int,
        keys: int,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        heads: tuple[int, int, int, int] = (*HEADS, HEADS[2]),
    ) -> None:
        torch.manual_seed(seed)
        hq, hk, d, dv = self.heads = heads
        pages = -(-keys // PAGE)
        pool = max(bs * pages, 8192)
        self.bs, self.new, self.keys, self.scale = bs, new, keys, d**-0.5
        self.q = torch.randn(bs * new, hq, d, device="cuda", dtype=dtype)
        self.k_cache, self.v_cache = (
            torch.randn(pool, PAGE, hk, x, device="cuda", dtype=dtype) for x in (d, dv)
        )
        self.table = (
            torch.randperm(pool, device="cuda", dtype=torch.int64)[: bs * pages].view(bs, pages).int()
        )
        slots = self.table.view(bs, pages, 1) * PAGE + torch.arange(PAGE, device="cuda", dtype=torch.int32)
        self.slots = slots.view(bs, -1)[:, :keys].contiguous().view(-1)
        step = torch.arange(bs + 1, device="cuda", dtype=torch.int32)
        self.kv_indptr, self.qo_indptr = step * keys, step * new
        self.lens = torch.full((bs,), keys, device="cuda", dtype=torch.int32)
        self.out = torch.empty(bs * new, hq, dv, device="cuda", dtype=dtype)
        self.lse = torch.empty(bs * new, hq, device="cuda", dtype=torch.float32)

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """k and v ``[bs, kv_heads, keys, head_dim]``."""
        found = [c.view(-1, *c.shape[2:])[self.slots.long()] for c in (self.k_cache, self.v_cache)]
        k, v = (x.view(self.bs, self.keys, *x.shape[1:]).transpose(1, 2).contiguous() for x in found)
        return k, v

    def ours(self) -> Callable[[], Tensor]:
        if self.new == 1:
            from hal.backends.cuda.decode_attention import decode_attention

            return lambda: decode_attention(
                self.q,
                self.k_cache,
                self.v_cache,
                self.kv_indptr,
                self.slots,
                self.out,
                self.lse,
                scale=self.scale,
            )
        from hal.backends.cuda.extend_attention import extend_attention

        return lambda: extend_attention(
            self.q, self.k_cache, self.v_cache, self.qo_indptr, self.kv_indptr, self.slots, self.out, self.lse,
            scale=self.scale,
        )  # fmt: skip

    def fa3(self) -> Callable[[], Tensor] | None:
        for name in ("flash_attn_interface", "sgl_kernel.flash_attn"):
            try:
                fn = importlib.import_module(name).flash_attn_with_kvcache
            except (ImportError, AttributeError, OSError):
                continue
            q = self.q.view(self.bs, self.new, *self.q.shape[1:])

            def call(fn: Any = fn, q: Tensor = q) -> Tensor:
                found = fn(
                    q, self.k_cache, self.v_cache, cache_seqlens=self.lens, page_table=self.table,
                    softmax_scale=self.scale, causal=True,
                )  # fmt: skip
                result: Tensor = found[0] if isinstance(found, tuple) else found
                return result.view(self.q.shape)

            return call
        return None

    def flashinfer(self) -> dict[str, Callable[[], Tensor]]:
        """Its kernels for this batch, planned beforehand: what the host does for them is not in the times."""
        try:
            import flashinfer
        except ImportError:
            return {}
        hq, hk, d = HEADS
        pages = -(-self.keys // PAGE)
        indptr = _host.arange(self.bs + 1, dtype=torch.int32) * pages
        last = _host.full((self.bs,), (self.keys - 1) % PAGE + 1, dtype=torch.int32)
        same = {"sm_scale": self.scale, "q_data_type": self.q.dtype, "kv_data_type": self.q.dtype}
        made: dict[str, Callable[[], Tensor]] = {}
        for backend in ("fa2",) if self.new == 1 else ("fa2", "fa3"):
            scratch = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
            if self.new == 1:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    scratch, "NHD", use_tensor_cores=True, backend=backend
                )
                wrapper.plan(indptr, self.table.view(-1), last, hq, hk, d, PAGE, **same)
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=backend)
                wrapper.plan(
                    self.qo_indptr.cpu(),
                    indptr,
                    self.table.view(-1),
                    last,
                    hq,
                    hk,
                    d,
                    PAGE,
                    causal=True,
                    **same,
                )

            def call(wrapper: Any = wrapper) -> Tensor:
                found: Tensor = wrapper.run(self.q, (self.k_cache, self.v_cache), out=self.out)
                return found

            made[f"flashinfer {backend}"] = call
        return made

    def sdpa(self) -> Callable[[], Tensor] | None:
        """None where torch's causal mask, which is aligned to the first key, means something else."""
        if self.new != 1 and self.new != self.keys:
            return None
        k, v = self.contiguous()
        q = self.q.view(self.bs, self.new, *self.q.shape[1:]).transpose(1, 2).contiguous()

        def call() -> Tensor:
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.new > 1, enable_gqa=True)
            return found.transpose(1, 2).reshape(self.q.shape) if checking else found

        return call

    def check(self, out: Tensor, which: Iterable[int]) -> float:
        """The largest error of some requests' last tokens, in units of the bound."""
        worst = 0.0
        hq, hk, d, _ = self.heads
        for i in which:
            mine = self.slots[i * self.keys : (i + 1) * self.keys].long()
            k, v = (
                c.view(-1, hk, c.shape[-1])[mine].double().repeat_interleave(hq // hk, 1)
                for c in (self.k_cache, self.v_cache)
            )
            rows = torch.arange(
                (i + 1) * self.new - min(self.new, 8), (i + 1) * self.new, device="cuda", dtype=torch.int64
            )
            q = self.q[rows].double()
            logits = torch.einsum("nhd,jhd->nhj", q, k) * self.scale
            size = torch.einsum("nhd,jhd->nhj", q.abs(), k.abs()).amax(-1) * self.scale
            position = self.keys - (i + 1) * self.new + rows
            seen = torch.arange(self.keys, device="cuda", dtype=torch.int64) <= position.view(-1, 1, 1)
            p = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
            many = (position + 1).view(-1, 1).expand(len(rows), hq)
            weight = torch.einsum("nhj,jhd->nhd", p, v.abs())
            slack, _ = _judge.attention_slack(self.q.dtype, d, size, many, weight)
            truth = torch.einsum("nhj,jhd->nhd", p, v)
            want = _judge.Want(
                _host.ones(truth.shape, dtype=torch.bool), (_judge.Candidate(truth.cpu(), slack.cpu()),)
            )
            got = out[rows].cpu()
            if not _judge.right_any(got, want).all():
                raise AssertionError(f"request {i}: outside the bound")
            worst = max(worst, _judge.headroom(got, want))
        return worst


checking = False


def _table(op: str, cases: Sequence[tuple[int, int, int]], rounds: int) -> list[Row]:
    """Rows of one op: device and host microseconds, ratios to the peers of the same run, bytes and FLOPs."""
    global checking
    out = []
    for bs, new, keys in cases:
        sets = [Inputs(bs, new, keys, seed=s) for s in range(2)]
        impls: dict[str, list[Callable[[], Tensor]]] = {}
        for x in sets:
            peers = {"fa3": x.fa3(), **x.flashinfer(), "sdpa contiguous": x.sdpa()}
            for name, fn in {"hal": x.ours(), **peers}.items():
                if fn is not None:
                    impls.setdefault(name, []).append(fn)
        checking = True
        room = {name: sets[0].check(fns[0](), {0, bs - 1}) for name, fns in impls.items()}
        checking = False
        calls = {name: (lambda i, fns=fns: fns[i]()) for name, fns in impls.items()}
        work = bs * new * (keys - (new - 1) / 2)
        per = max(2, min(48, int(2e5 / max(1.0, bs * keys / 200 + work / 1e4))))
        times = device_us(calls, len(sets), per_graph=per, rounds=rounds)
        hq, hk, d = HEADS
        moved = 2 * bs * keys * hk * d * 2
        out.append({
            "op": op, "bs": bs, "new": new, "keys": keys, "device_us": times,
            "host_us": host_us({"hal": calls["hal"]}, len(sets)) if bs * keys <= 1 << 16 else None,
            "ratio": {n: times["hal"] / t for n, t in times.items() if n != "hal"}, "headroom": room,
            "gbs": moved / times["hal"] / 1e3, "tflops": 4 * work * hq * d / times["hal"] / 1e6,
        })  # fmt: skip
        del sets, impls, calls
        gc.collect()
        torch.cuda.empty_cache()
    return out


def decode_attention(quick: bool = False) -> list[Row]:
    """Rows: batch, device and host microseconds of each; `target` is the ratio to SDPA that FA3 has."""
    cases = DECODE[::5] if quick else DECODE
    rows = _table("decode_attention", [(bs, 1, keys) for bs, keys in cases], 3 if quick else 25)
    return [{**r, "target": t} for r, t in zip(rows, DECODE_TARGET[:: 5 if quick else 1], strict=True)]


def extend_attention(quick: bool = False) -> list[Row]:
    """Rows: batch, device and host microseconds of each."""
    cases = EXTEND[-1:] if quick else EXTEND
    return _table(
        "extend_attention", [(bs, new, new + prefix) for bs, new, prefix in cases], 3 if quick else 15
    )


def hopper(rounds: int = 9) -> list[Row]:
    """Rows: heads, batch, device microseconds of both kernels of `extend_attention`, in turn in one run."""
    from hal.backends.cuda import extend_attention as extend

    rows, usual = [], extend.for_hopper
    for heads, *cases in HOPPER:
        for bs, new, prefix in cases:
            x = Inputs(bs, new, new + prefix, heads=heads)
            calls: dict[str, Callable[[int], Tensor]] = {}
            room = {}
            for name, choice in {"hopper": usual, "triton": lambda *_: False}.items():
                extend._plans.clear()
                extend.for_hopper = choice
                try:
                    room[name] = x.check(x.ours()(), {0, bs - 1})
                finally:
                    extend.for_hopper = usual
                key, plan = extend._plans.popitem()

                def call(_: int, x: Inputs = x, key: Any = key, plan: Any = plan) -> Tensor:
                    extend._plans[key] = plan
                    return x.ours()()

                calls[name] = call
            times = device_us(calls, 1, per_graph=4, rounds=rounds)
            work = 4 * bs * new * (new + prefix - (new - 1) / 2) * heads[0] * (heads[2] + heads[3]) / 2
            rows.append({
                "op": "extend_attention", "heads": heads, "bs": bs, "new": new, "keys": new + prefix,
                "device_us": times, "ratio": times["hopper"] / times["triton"],
                "tflops": work / times["hopper"] / 1e6, "headroom": room,
            })  # fmt: skip
            del x, calls
            gc.collect()
            torch.cuda.empty_cache()
    extend._plans.clear()
    return rows


# --- correctness on the device ----------------------------------------------------------------------


def _there(value: Any, memo: dict[int, Tensor]) -> Any:
    """The argument on the device, views of one storage still views of one storage."""
    if not isinstance(value, Tensor):
        return value
    store = value.untyped_storage()
    if store.data_ptr() not in memo:
        memo[store.data_ptr()] = _host.empty(0, dtype=torch.uint8).set_(store).cuda()
    base = memo[store.data_ptr()].untyped_storage()
    return torch.empty(0, dtype=value.dtype, device="cuda").set_(
        base, value.storage_offset(), value.shape, value.stride()
    )


def verdict(name: str, args: dict[str, Any]) -> float:
    """One call through the launcher, then from a captured graph: the error in units of the bound, or AssertionError."""
    spec = ops.get_spec(name)
    fn = getattr(importlib.import_module(f"hal.backends.cuda.{name}"), name)
    wants = spec.oracle(args)
    memo: dict[int, Tensor] = {}
    here = {k: _there(v, memo) for k, v in args.items()}
    call = functools.partial(fn, **here)
    worst = 0.0
    for captured in (False, True):
        for x in ("out", "lse"):
            if here[x] is not None:
                here[x].fill_(torch.nan)
        result = call()
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = call()
            result.fill_(torch.nan)
            graph.replay()
            graph.replay()
        torch.cuda.synchronize()
        for x, want in wants.items():
            got = (result if x == "return" else here[x]).cpu()
            bad = ~_judge.right_any(got, want)
            if bad.any():
                raise AssertionError(f"{x}: {int(bad.sum())} wrong, first at {bad.nonzero()[0].tolist()}")
            worst = max(worst, _judge.headroom(got, want))
    return worst


def check(names: Iterable[str] = ("decode_attention", "extend_attention")) -> list[Row]:
    """Every sample through the launchers, twice in a captured graph as well. Rows: op, headroom, failures."""
    rows = []
    for name in names:
        spec, worst, failed = ops.get_spec(name), 0.0, []
        for sample in spec.samples:
            try:
                worst = max(worst, verdict(name, spec.make(**sample.params)))
            except Exception as e:  # one bad sample must not hide the others
                failed.append(f"{sample.name}: {type(e).__name__}: {str(e)[:200]}")
        rows.append({"op": name, "samples": len(spec.samples), "headroom": worst, "failed": failed})
    return rows


# --- tuning -----------------------------------------------------------------------------------------


def tune() -> list[Row]:
    """Device microseconds of our Triton kernels by configuration, at the tables' points."""
    from hal.backends.cuda import decode_attention as decode
    from hal.backends.cuda import extend_attention as extend

    found = []

    def time(x: Inputs, about: Row) -> None:
        launch.forget()
        try:
            us = device_us({"hal": lambda i: x.ours()()}, 1, per_graph=8, rounds=7)["hal"]
        except Exception as e:  # a tile that does not fit is an answer
            found.append({**about, "error": f"{type(e).__name__}: {str(e)[:80]}"})
            return
        found.append({**about, "us": round(us, 2)})

    tiles, per_sm = decode.tiles, decode.PER_SM
    for bs, keys in DECODE:
        x = Inputs(bs, 1, keys)
        for n, warps, stages in (
            (64, 4, 3),
            (32, 4, 3),
            (32, 4, 4),
            (64, 4, 4),
            (128, 4, 3),
            (64, 2, 3),
            (128, 8, 3),
        ):
            for programs in (2, 4, 8):
                decode.tiles = lambda *a, n=n, w=warps, s=stages: (16, n, w, s)
                decode.PER_SM = programs
                about = {"n": n, "warps": warps, "stages": stages, "per_sm": programs}
                time(x, {"op": "decode", "bs": bs, "keys": keys, **about})
        del x
        torch.cuda.empty_cache()
    decode.tiles, decode.PER_SM = tiles, per_sm
    wide, usual = extend.tiles, extend.for_hopper
    extend.for_hopper = lambda *_: False
    for bs, new, prefix in EXTEND:
        x = Inputs(bs, new, new + prefix)
        for tile in (
            (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
            (64, 128, 4, 3),
        ):  # fmt: skip
            extend.tiles = lambda *a, t=tile: t
            time(x, {"op": "extend", "bs": bs, "new": new, "prefix": prefix, "tile": tile})
        del x
        torch.cuda.empty_cache()
    extend.tiles, extend.for_hopper = wide, usual
    launch.forget()
    return found


TABLES: dict[str, Callable[[], list[Row]]] = {
    "check": check, "decode": decode_attention, "extend": extend_attention, "hopper": hopper, "tune": tune,
}  # fmt: skip

if __name__ == "__main__":
    for wanted in sys.argv[1:] or TABLES:
        for row in TABLES[wanted]():
            print(json.dumps(row), flush=True)
