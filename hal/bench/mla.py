"""MLA decode on a GPU: rows of 576 shared by all query heads, beside FlashInfer's own kernels for them.

    python -m hal.bench.mla            check, then device time, at the shapes of DeepSeek-V3 and of a rank of eight
    python -m hal.bench.mla tune       our tiles, at each point

Rows as JSON, a line each: device microseconds by implementation, ours over each peer's, and what bytes and products
cost at least at `COPY` and `PRODUCTS`; `hal bench mla_decode_attention --device cuda` shows them. Pages of 64, spread
over a pool; outputs are judged by the conformance suite's bound before anything is timed. FlashInfer is planned
beforehand; ours has no plan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.bench.attention import verdict
from hal.bench.cuda import device_us, host_us
from hal.ops import get_spec

PAGE = 64
POINTS = (
    (128, 1, 4096), (128, 1, 32768), (128, 16, 4096), (128, 64, 4096), (128, 128, 2048), (16, 1, 4096), (16, 16, 4096),
    (16, 64, 4096),
)  # fmt: skip
"""(query heads, bs, keys each)."""
COPY = 4.25e6
"""Bytes a microsecond that a device-to-device copy moves on an H200."""
PRODUCTS = 790e6
"""FLOPs a microsecond of a bf16 matrix product there."""
FORMS: tuple[dict[str, Any], ...] = (
    {"q_heads": 128},
    {"q_heads": 16, "longest": 700, "indptr": "i64"},
    {"q_heads": 64, "bs": 40, "longest": 90},
    {"q_heads": 128, "values": "skip", "index": "i64", "longest": 300},
    {"q_heads": 24},
    {"q_heads": 20, "cache": "paged", "dtype": "fp16"},
    {"q_heads": 128, "lse": False, "bs": 3, "longest": 2500, "slots": 8000},
)
"""What the check asks for beside the contract's own samples."""


class Inputs:
    """One batch, its pages spread over a pool; `sets` batches of slots of one pool, so that none is in the cache."""

    def __init__(self, heads: int, bs: int, keys: int, sets: int = 4) -> None:
        torch.manual_seed(0)
        pages = -(-keys // PAGE)
        pool = max(bs * pages * sets, 4096)
        self.bs, self.keys, self.heads, self.scale = bs, keys, heads, 192**-0.5
        bf16, i32 = torch.bfloat16, torch.int32
        self.q = torch.randn(bs, heads, 576, device="cuda", dtype=bf16)
        self.rows = torch.randn(pool, PAGE, 1, 576, device="cuda", dtype=bf16)
        self.tables = (
            torch.randperm(pool, device="cuda", dtype=torch.int64)[: sets * bs * pages]
            .view(sets, bs, pages)
            .to(i32)
        )
        each = torch.arange(PAGE, device="cuda", dtype=i32)
        slots = self.tables[..., None] * PAGE + each
        self.slots = slots.view(sets, bs, -1)[:, :, :keys].contiguous().view(sets, -1)
        self.indptr = torch.arange(bs + 1, device="cuda", dtype=i32) * keys
        self.out = torch.empty(bs, heads, 512, device="cuda", dtype=bf16)

    def ours(self) -> Callable[[int], Tensor]:
        from hal.backends.cuda.decode_attention import decode_attention

        values = self.rows[..., :512]
        return lambda i: decode_attention(
            self.q, self.rows, values, self.indptr, self.slots[i], self.out, scale=self.scale
        )

    def flashinfer(self) -> dict[str, Callable[[int], Tensor]]:
        try:
            import flashinfer
        except ImportError:
            return {}
        made: dict[str, Callable[[int], Tensor]] = {}
        pages = self.tables.shape[2]
        starts = torch.arange(self.bs + 1, device="cuda", dtype=torch.int32)
        lens = torch.full((self.bs,), self.keys, device="cuda", dtype=torch.int32)
        latent, rotated = self.rows[:, :, 0, :512], self.rows[:, :, 0, 512:]
        for backend in ("fa2", "fa3"):
            wrappers = []
            for table in self.tables:
                scratch = torch.empty(128 << 20, device="cuda", dtype=torch.uint8)
                wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=backend)
                wrapper.plan(
                    starts, starts * pages, table.reshape(-1), lens, self.heads, 512, 64, PAGE, False, self.scale,
                    torch.bfloat16, torch.bfloat16,
                )  # fmt: skip
                wrappers.append(wrapper)
            made[f"flashinfer {backend}"] = (
                lambda i, w=wrappers: w[i].run(  # type: ignore[misc]
                    self.q[..., :512], self.q[..., 512:], latent, rotated
                )
            )
        return made


def check() -> None:
    """Every sample of the contract with MLA's rows, and `FORMS`; raises where one is wrong."""
    made = get_spec("decode_attention")
    usual = {"bs": 5, "longest": 900, "slots": 4800, "head_dim": 576, "v_head_dim": 512, "kv_heads": 1}
    worst = 0.0
    for form in FORMS:
        args = made.make(**{**usual, "cache_view": "shared", "dtype": "bf16", **form})
        error = verdict("decode_attention", args)
        worst = max(worst, error)
        print(json.dumps({"check": form, "error": round(error, 3)}), flush=True)
    for sample in made.samples:
        if sample.params.get("head_dim") == 576 and not sample.large:
            worst = max(worst, verdict("decode_attention", made.make(**sample.params)))
    print(json.dumps({"check": "all", "worst": round(worst, 3)}), flush=True)


def row(heads: int, bs: int, keys: int, peers: bool = True, quick: bool = False) -> dict[str, Any]:
    x = Inputs(heads, bs, keys)
    calls = {"hal": x.ours(), **(x.flashinfer() if peers else {})}
    mine = calls["hal"](0).clone()
    for name, call in calls.items():
        found = call(0)
        found = found[0] if isinstance(found, tuple) else found
        far = float((found.float() - mine.float()).abs().max() / mine.float().abs().max())
        assert far < 0.02, f"{name} differs by {far}"
    many = 24 if bs * keys > 100_000 else 48
    times = device_us(calls, len(x.tables), per_graph=many, rounds=3 if quick else 25)
    return {
        "op": "decode_attention", "rows": "mla", "heads": heads, "bs": bs, "keys": keys, "device_us": times,
        "host_us": host_us({"hal": calls["hal"]}, count=120),
        "ratio": {name: times["hal"] / t for name, t in times.items() if name != "hal"},
        "least_us": {"bytes": bs * keys * 1152 / COPY, "flops": 2 * bs * keys * heads * 1088 / PRODUCTS},
    }  # fmt: skip


def mla_decode_attention(quick: bool = False) -> list[dict[str, Any]]:
    """The rows of `POINTS`, after a first look that MLA's rows come out right at all."""
    if not quick:
        check()
    return [row(*point, quick=quick) for point in (POINTS[:1] if quick else POINTS)]


def main(arguments: list[str]) -> None:
    if arguments == ["tune"]:
        from hal.backends.cuda import decode_attention

        for tile in ((32, 4, 2), (64, 2, 1), (32, 4, 1)):
            decode_attention.HOPPER = tile
            decode_attention._plans.clear()
            for point in POINTS:
                print(json.dumps({"tile": tile, **row(*point, peers=False)}), flush=True)
        return
    check()
    for point in POINTS:
        print(json.dumps(row(*point)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
