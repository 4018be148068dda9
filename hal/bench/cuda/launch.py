# mypy: disable-error-code="no-untyped-call, misc, unused-ignore"
# Kernels' parameters have no types.
"""The tables of how kernels are started: what a launch costs the host, and what starting programmatically saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hal
from hal.bench import OURS, Row, peers, timing
from hal.bench import launcher as launcher_of
from hal.bench.cuda import inputs, mla, pages
from hal.bench.cuda.harness import record_launches
from hal.bench.cuda.rope import rope_sets, sglang_rope_store

TOKENS = (1, 32, 512, 2048)


def launcher(quick: bool = False) -> list[Row]:
    """Rows: host microseconds of one launch of an empty kernel: by Triton, by hal, by Triton's C launcher alone."""
    from hal.bench.cuda import _empty

    x = torch.zeros(64, device=inputs.DEVICE, dtype=torch.float32)
    rows = []
    for name, kernel, args in (
        ("4 pointers, 2 ints", _empty.small, (x, x, x, x, 7, 48)),
        ("10 pointers, 9 ints", _empty.large, (x,) * 10 + (7, 48, 5, 6, 128, 9, 33, 64, 1000)),
    ):
        bound = kernel.bind(BLOCK=128, num_warps=4)
        compiled = kernel.jit[(1,)](*args, BLOCK=128, num_warps=4)
        stream = torch.cuda.current_stream().cuda_stream
        pointers = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        head = (stream, compiled.function, False, False, None, None, compiled.packed_metadata, None, None, None)
        calls: dict[str, Callable[[int], Any]] = {
            "triton": lambda i, k=kernel, a=args: k.jit[(1,)](*a, BLOCK=128, num_warps=4),
            OURS: lambda i, b=bound, a=args: b.start((1, 1, 1), *a),
            "triton's C launcher": lambda i, c=compiled.run.launch, h=head, p=pointers: c(1, 1, 1, *h, *p, None),
        }
        for call in calls.values():
            call(0)
        times = timing.host_us(calls, 1, 200 if quick else 2000)
        rows.append({"op": "launch", "arguments": name, "host_us": times})
    return rows


def programmatic_launch(quick: bool = False) -> list[Row]:
    """Rows: device microseconds of ops back to back, launched programmatically (``hal``) and not (``without``)."""
    tokens = inputs.req_to_token()
    index = torch.arange(32, device=inputs.DEVICE, dtype=torch.int64)
    packed = torch.empty(128, dtype=torch.int64, device=inputs.DEVICE)
    cases: dict[tuple[str, str], Callable[[], tuple[Any, ...]]] = {
        ("get_last_loc", "bs 32"): lambda: (tokens, index, index + 1),
        ("assign_extend_cache_locs", "bs 32, 4 each"): lambda: (tokens, index, index, index + 4, packed),
        ("compute_positions", "bs 32, 4 each"): lambda: (index, index + 4, packed),
    }
    for n in TOKENS:
        cases["rope_kv_write", f"llama3-8b, {n} tokens"] = lambda n=n: (*rope_sets(n, "llama3-8b")[0].values(),)
    rows = []
    for (op, case), make in cases.items():
        call = partial(launcher_of("cuda", op), *make())
        calls: dict[str, Callable[[int], Any]] = {
            OURS: lambda i, call=call: call(),
            "without": without_programmatic(call),
        }
        times = timing.device_us(calls, 1, rounds=3 if quick else 25)
        rows.append({"op": "programmatic launch", "of": op, "case": case, "device_us": times})
    return rows


def without_programmatic(call: Callable[[], Any]) -> Callable[[int], None]:
    """What `call` launches, launched otherwise: each waits for the end of the one before, as kernels usually do."""
    usual = [
        (one.bind(**dict.fromkeys(one.static.keys() & {"PDL", "launch_pdl"}, False)), one)
        for one in record_launches(call)
    ]

    def again(_: int) -> None:
        for bound, one in usual:
            bound.start(one.grid, *one.args)

    return again


def host_calls(quick: bool = False) -> list[Row]:
    """Rows: host microseconds of one call of an op on one token, 32/8/128 in bf16, 300 keys; decode also with so few
    that no request is split; and of calls of two launches, over 4096 keys.

    ``hal`` is the backend's own function, as `hal.bind` gives it, its results allocated by it where they may be;
    ``out given`` the same with the caller's; ``dispatched`` selected and checked, as users call it.
    """
    rope = rope_sets(1, "llama3-8b")[0]
    index = torch.arange(2, device=inputs.DEVICE, dtype=torch.int64)
    keys = 300 if quick else 4096
    decode, extend, few, split = (pages.Inputs(1, *sizes) for sizes in ((1, 300), (2, 300), (1, 150), (16, keys)))
    fp8 = pages.Inputs(1, 1, keys, cache=torch.float8_e4m3fn)
    latent = mla.Inputs(16, 1, keys, sets=1)
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
        "get_last_loc": ((inputs.req_to_token(), index, index + 1), {}, ()),
        "compute_positions": ((index, index + 4, torch.empty_like(index).repeat(4)), {}, ()),
        "alloc_decode": ((index + 1, index - 1, index, 1, torch.empty_like(index)), {}, ()),
        "kv_write": (tuple(rope[n] for n in ("k", "v", "k_cache", "v_cache", "slots")), {}, ()),
        "rope_kv_write": (tuple(rope.values()), {}, ()),
        **{
            name: ((x.q, x.k_cache, x.v_cache, x.kv_indptr, x.slots), {"scale": x.scale}, (x.out, x.lse))
            for name, x in (
                ("decode_attention", decode),
                ("decode_attention, 150 keys", few),
                ("decode_attention, e4m3, two launches", fp8),
            )
        },
        "decode_attention, MLA, two launches": (
            (latent.q, latent.rows, latent.rows[..., :512], latent.indptr, latent.slots[0]),
            {"scale": latent.scale},
            (latent.out,),
        ),
        **{
            name: ((x.q, x.k_cache, x.v_cache, x.qo_indptr, x.kv_indptr, x.slots), {"scale": x.scale}, (x.out, x.lse))
            for name, x in (("extend_attention", extend), ("extend_attention, 16 tokens, two launches", split))
        },
    }
    rows = []
    for of, (given, named, out) in cases.items():
        op = of.partition(",")[0]
        bound, dispatched = launcher_of("cuda", op), getattr(hal, op)
        calls: dict[str, Callable[[], Any]] = {
            OURS: partial(bound, *given, **named),
            "dispatched": partial(dispatched, *given, **named),
        }
        if out:
            calls["out given"] = partial(bound, *given, *out, **named)
            calls["dispatched, out given"] = partial(dispatched, *given, *out, **named)
        if op == "rope_kv_write" and "sglang" in peers.available():
            calls["sglang jit fused"] = sglang_rope_store(rope)
        for call in calls.values():
            call()
        times = timing.host_us({n: lambda i, c=c: c() for n, c in calls.items()}, 1, 80 if quick else 2000)
        rows.append({"op": "host call", "of": of, "host_us": times})
    return rows


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "launcher": launcher,
    "programmatic_launch": programmatic_launch,
    "host_calls": host_calls,
}
