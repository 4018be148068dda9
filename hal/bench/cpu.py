"""The tables of ``hal bench --device cpu`` of the core ops and the host path. The others': `hal.bench.cpu_engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.bench import OURS, Row, table
from hal.bench.judge import check
from hal.bench.timing import measure
from hal.kv.pool import KVPool
from hal.ops import get_spec

SIZES = (1, 32, 256, 1024, 4096)
SHAPES = {
    "llama3-8b": {"q_heads": 32, "kv_heads": 8, "head_dim": 128},
    "smollm2": {"q_heads": 9, "kv_heads": 3, "head_dim": 64},
}


def _by_position(fn: Callable[..., Any], a: dict[str, Any]) -> Any:
    return fn(*a.values())


# --- bookkeeping ------------------------------------------------------------------------------------


@table
def get_last_loc(quick: bool) -> Iterator[Row]:
    """One int32 table of 4096 x 8192; valid indices, for eager torch does not check them."""
    from hal.backends.cpu.get_last_loc import get_last_loc as ours

    def eager(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
        return torch.where(prefix_lens > 0, req_to_token[req_pool_indices, prefix_lens - 1], -1)

    for bs in SIZES[:2] if quick else SIZES:

        def make(bs: int = bs) -> dict[str, Any]:
            return get_spec("get_last_loc").make(bs=bs, requests=512 if quick else 4096, width=8192)

        args = tuple(make().values())
        impls: dict[str, Callable[..., Any]] = {
            OURS: ours,
            "eager": eager,
            "reference": get_spec("get_last_loc").reference,
        }
        for name, fn in impls.items():
            # Eager torch may keep the table's int32: a conversion less than the contract asks for.
            def widened(a: dict[str, Any], fn: Callable[..., Any] = fn) -> Tensor:
                found: Tensor = fn(*a.values())
                return found.to(a["prefix_lens"].dtype)

            check("get_last_loc", name, widened, make)
        calls = {name: partial(fn, *args) for name, fn in impls.items()}
        yield {"op": "get_last_loc", "bs": bs, **measure(calls, quick)}


@table
def assign_extend_cache_locs(quick: bool) -> Iterator[Row]:
    """Eager torch twice: all requests at once, and a slice a request, whichever is faster being the peer."""
    from hal.backends.cpu.assign_extend_cache_locs import assign_extend_cache_locs as ours

    def gathered(table: Tensor, requests: Tensor, start: Tensor, end: Tensor, out: Tensor) -> Tensor:
        length = end - start
        i = torch.repeat_interleave(length)
        column = _host.arange(i.shape[0]) - (length.cumsum(0) - length)[i] + start[i]
        out[: i.shape[0]] = table[requests[i], column]
        return out

    def sliced(table: Tensor, requests: Tensor, start: Tensor, end: Tensor, out: Tensor) -> Tensor:
        at = 0
        for r, a, b in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
            out[at : at + b - a] = table[r, a:b]
            at += b - a
        return out

    cases = [(bs, kind) for bs in (SIZES[:2] if quick else SIZES) for kind in ("4 each", "ragged to 64")]
    for bs, kind in [*cases, *([] if quick else [(1, "a row of 8192"), (32, "a row of 8192 each")])]:

        def make(bs: int = bs, kind: str = kind) -> dict[str, Any]:
            g = torch.Generator().manual_seed(bs)
            table = _host.randint(0, 2**20, (512 if quick else 4096, 8192), dtype=torch.int32, generator=g)
            length = {"4 each": _host.full((bs,), 4), "ragged to 64": _host.randint(1, 65, (bs,), generator=g)}.get(
                kind, _host.full((bs,), 8192)
            )
            start = (_host.rand(bs, generator=g) * (8193 - length)).long()
            return {
                "req_to_token": table,
                "req_pool_indices": _host.randint(0, table.shape[0], (bs,), generator=g),
                "start_offsets": start,
                "end_offsets": start + length,
                "out": _host.empty(int(length.sum()), dtype=torch.int64),
            }

        args = tuple(make().values())
        reference = get_spec("assign_extend_cache_locs").reference
        impls: dict[str, Callable[..., Any]] = {
            OURS: ours,
            "eager, gathered": gathered,
            "eager, sliced": sliced,
            "reference": reference,
        }
        for name, fn in impls.items():
            check("assign_extend_cache_locs", name, partial(_by_position, fn), make)
        calls = {name: partial(fn, *args) for name, fn in impls.items()}
        yield {"op": "assign_extend_cache_locs", "bs": bs, "lengths": kind, **measure(calls, quick)}


# --- rope_kv_write ----------------------------------------------------------------------------------


def _eager_rope(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """What one writes by hand: fp32 arithmetic, valid indices, no fp8."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    q.copy_(rotate(q))
    k.copy_(rotate(k))
    k_cache[slots] = k
    v_cache[slots] = v


def by_name(fn: Callable[..., Any], a: dict[str, Any]) -> Any:
    return fn(**a)


def _plain(fn: Callable[..., Any], a: dict[str, Any]) -> Any:
    return fn(*list(a.values())[:8])


@table
def rope_kv_write(quick: bool) -> Iterator[Row]:
    """memcpy copies half as many bytes as the op reads and writes: it moves as much."""
    from hal.backends.cpu.rope_kv_write import rope_kv_write as ours

    cases: list[tuple[str, str, int]] = [("llama3-8b", "bf16", t) for t in (1, 16, 256, 2048)]
    cases += [("llama3-8b", d, t) for d in ("fp16", "fp32") for t in (1, 16, 256, 2048)]
    cases += [("llama3-8b", "bf16 to e4m3", t) for t in (1, 16, 256, 2048)]
    cases += [("smollm2", "fp32", t) for t in (1, 16, 256)]
    for model, dtype, tokens in [cases[0], cases[1], cases[13]] if quick else cases:
        fp8 = "to" in dtype
        params: dict[str, Any] = {
            **SHAPES[model],
            "n": tokens,
            "dtype": dtype.split()[0],
            "slots": 2 * max(tokens, 1024),
            "max_positions": 4096,
            **({"cache_dtype": "e4m3", "scale": "float"} if fp8 else {}),
        }

        def make(params: dict[str, Any] = params) -> dict[str, Any]:
            return get_spec("rope_kv_write").make(**params)

        impls: dict[str, Callable[[dict[str, Any]], Any]] = {
            OURS: partial(by_name, ours),
            "reference": partial(by_name, get_spec("rope_kv_write").reference),
        }
        if not fp8:
            impls["eager"] = partial(_plain, _eager_rope)
            if not quick and (model, dtype) == ("llama3-8b", "bf16"):
                torch._dynamo.reset()
                compiled = torch.compile(_eager_rope, dynamic=False)
                impls["torch.compile"] = partial(_plain, compiled)
        for name, fn in impls.items():
            check("rope_kv_write", name, fn, make)
        moved, copy = _memcpy(make())
        calls: dict[str, Callable[[], Any]] = {n: partial(fn, make()) for n, fn in impls.items()}
        calls["memcpy"] = copy
        row = {"op": "rope_kv_write", "model": model, "dtype": dtype, "tokens": tokens, "work": {"bytes": moved}}
        yield {**row, **measure(calls, quick)}


def _memcpy(a: dict[str, Any]) -> tuple[int, Callable[[], Any]]:
    """(bytes that the op reads and writes, a copy that moves as many)."""
    read = sum(a[x].nbytes for x in ("q", "k", "v"))
    rows = a["k_cache"].shape[0]
    cached = sum(a[f"{x}_cache"].nbytes // rows * a["q"].shape[0] for x in ("k", "v"))
    moved = read + a["q"].nbytes + a["k"].nbytes + cached
    source = _host.zeros(moved // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    return moved, lambda: target.copy_(source)


# --- kv_transfer ------------------------------------------------------------------------------------


@table
def kv_transfer(quick: bool) -> Iterator[Row]:
    """Pages in random order, host to host. Eager torch assigns by index, a layer at a time."""
    from hal.backends.cpu.kv_transfer import kv_transfer as ours

    layers, tokens, slots = (4, 64, 256) if quick else (32, 1024, 2048)
    kinds: dict[str, dict[str, Any]] = {
        "mha 8x128": {"heads": 8, "head_dim": 128},
        "mla 576": {"mla": True, "head_dim": 576},
    }
    pairs = [
        ("mha 8x128", "layer_first", "page_first"),
        ("mha 8x128", "page_first", "layer_first"),
        ("mha 8x128", "layer_first", "layer_first"),
        ("mha 8x128", "layer_first", "page_first_direct"),
        ("mha 8x128", "page_first_direct", "page_first_direct"),
        ("mha 8x128", "page_head", "layer_first"),
        ("mla 576", "layer_first", "page_first"),
        ("mla 576", "page_first", "layer_first"),
    ]
    for kind, a, b in pairs[:2] if quick else pairs:
        for page in (1, 16, 64):
            make = partial(
                get_spec("kv_transfer").make,
                n=tokens,
                num_layers=layers,
                src=a,
                dst=b,
                src_page=page,
                dst_page=page,
                src_slots=slots,
                dst_slots=slots,
                order="pages",
                **kinds[kind],
            )
            impls: dict[str, Callable[[dict[str, Any]], Any]] = {OURS: partial(by_name, ours)}
            if not {"page_head", "page_first_direct"} & {a, b}:
                impls["eager"] = partial(by_name, _eager_transfer)
            for name, fn in impls.items():
                check("kv_transfer", name, fn, make)
            args = make()
            nbytes = tokens * layers * sum(p.row_bytes for p in args["src"].planes())
            source = _host.zeros(nbytes, dtype=torch.uint8)
            calls: dict[str, Callable[[], Any]] = {name: partial(fn, args) for name, fn in impls.items()}
            calls["memcpy"] = partial(torch.empty_like(source).copy_, source)
            got = measure(calls, quick, rounds=9)
            gbs = {n: nbytes / us / 1e3 for n, us in got.pop("wall_us").items()}
            case = {"op": "kv_transfer", "rows": kind, "from": a, "to": b, "page": page}
            yield {**case, "wall_gbs": gbs, **got}


def _eager_transfer(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, **_: Any) -> None:
    for layer in range(src.num_layers):
        for s, d in zip(src.layer(layer), dst.layer(layer), strict=True):
            if s is not None and d is not None:
                d[dst_slots] = s[src_slots]


# --- the host path ----------------------------------------------------------------------------------


@table
def dispatch(quick: bool) -> Iterator[Row]:
    """What selection and checks add to the backend's own function, on calls so small that little else is left."""
    import hal

    for op, params in (
        ("get_last_loc", {"bs": 1}),
        ("rope_kv_write", {"n": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 64}),
    ):
        a = get_spec(op).make(**params)
        args = [v for v in a.values() if isinstance(v, Tensor)]
        bound = getattr(hal.bind("cpu", backend="cpu"), op)
        checked = getattr(hal.bind("cpu", backend="cpu", checks="args"), op)
        free = getattr(hal, op)
        calls: dict[str, Callable[[], Any]] = {
            "bound": partial(bound, *args),
            "bound, checked": partial(checked, *args),
            "dispatched": partial(free, *args),
            "dispatched, named": partial(free, *args, backend="cpu"),
            "reference": partial(get_spec(op).reference, *args),
            "torch.empty_like": partial(torch.empty_like, args[0][:1]),
        }
        yield {"op": f"dispatch {op}", **measure(calls, quick)}


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "get_last_loc": get_last_loc,
    "assign_extend_cache_locs": assign_extend_cache_locs,
    "rope_kv_write": rope_kv_write,
    "kv_transfer": kv_transfer,
    "dispatch": dispatch,
}
