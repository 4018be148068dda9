"""Faults of rope_kv_write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.ops import get_spec
from hal.ops.spec import FP8
from sabotage._healthy import calling, fault

ROPE = "rope_kv_write"


def changed(change: Callable[[dict[str, Any]], Any], after: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """make: the healthy op with its arguments changed before, or with something done after."""

    def make(good: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            a = get_spec(ROPE).bind(*args, **kwargs)
            was = dict(a)
            kept = change(a)
            good(**a)
            if after is not None:
                after(was, kept)

        return run

    return make


def named(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    make.__name__ = name
    return make


def size_of(cache: Any) -> int:
    return cache.shape[0] * (cache.shape[1] if cache.ndim == 4 else 1)


def simple(name: str, message: str, change: Any, after: Any = None, *proofs: str, **options: Any) -> None:
    fault(ROPE, message, *proofs, **options)(named(name, changed(change, after)))


def put(name: str, value: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def change(a: dict[str, Any]) -> None:
        if a["k_cache"] is not None:
            a[name] = value(a)

    return change


def scratch(t: Any) -> Any:
    return None if t is None else t.clone()


simple("v_never_written", r"v_cache\[.*never written", put("v_cache", lambda a: scratch(a["v_cache"])))
simple("k_never_written", r"k_cache\[.*never written", put("k_cache", lambda a: scratch(a["k_cache"])))


def _swap(a: dict[str, Any]) -> None:
    if a["k_cache"] is not None and a["k_cache"].shape == a["v_cache"].shape:
        a["k_cache"], a["v_cache"] = a["v_cache"], a["k_cache"]


simple("k_and_v_swapped", r"they are what v_cache should hold", _swap)


WRONG = r"q\[.*times the allowed error"
simple("wrong_rotation_style", WRONG, lambda a: a.update(interleaved=not a["interleaved"]))
simple("interleaved_rotated_as_neox", WRONG, lambda a: a.update(interleaved=False))


def _whole_head(a: dict[str, Any]) -> None:
    cos, sin = a["cos_sin_cache"].chunk(2, dim=1)
    times = a["q"].shape[-1] // a["cos_sin_cache"].shape[1]
    a["cos_sin_cache"] = torch.cat([cos.repeat(1, times), sin.repeat(1, times)], dim=1)


simple("rotary_dim_ignored", r"q\[.*(wrong|does not name)", _whole_head)


def _keep_tail(a: dict[str, Any]) -> Any:
    return None if a["k_cache"] is None else a["k_cache"].clone()


def _restore_tail(a: dict[str, Any], kept: Any) -> None:
    if kept is not None:
        rotary = a["cos_sin_cache"].shape[1]
        a["k_cache"][..., rotary:] = kept[..., rotary:]


simple("pass_through_part_not_cached", r"k_cache\[.*never written", _keep_tail, _restore_tail)


def _inverse(a: dict[str, Any]) -> None:
    for name in ("k_scale", "v_scale"):
        if a[name] is not None:
            a[name] = 1 / a[name]


simple("scale_multiplied_instead_of_divided", r"k_cache\[.*times the allowed error", _inverse)


simple("scale_ignored", r"k_cache\[.*times the allowed error", lambda a: a.update(k_scale=None, v_scale=None))
simple("v_scaled_by_the_scale_of_k", r"v_cache\[", lambda a: a.update(v_scale=a["k_scale"]))


def _overflow(a: dict[str, Any], kept: Any) -> None:
    for name in ("k_cache", "v_cache"):
        cache = a[name]
        if cache is not None and cache.dtype in FP8:
            top = torch.finfo(cache.dtype).max
            wide = cache.float()
            odd = torch.inf if cache.dtype == torch.float8_e5m2 else torch.nan
            cache.copy_(torch.where(wide.abs() >= top, torch.full_like(wide, odd), wide).to(cache.dtype))


simple("no_saturation", r"_cache\[.*expected -?(448|57344), got (nan|-?inf)", lambda a: None, _overflow)


def _through(dtype: torch.dtype) -> Callable[..., Any]:
    def make(good: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            a = get_spec(ROPE).bind(*args, **kwargs)
            q, k = a["q"].float(), a["k"].float()
            good(q, k, a["v"], a["cos_sin_cache"].float(), a["positions"], interleaved=a["interleaved"])
            rounded_k = k.to(dtype).to(a["k"].dtype)
            own_k = a["k"] if a["write_k"] else a["k"].clone()
            good(**{**a, "k": own_k})
            valid = (a["positions"] >= 0) & (a["positions"] < a["cos_sin_cache"].shape[0])
            rotary = a["cos_sin_cache"].shape[1]
            a["q"][valid, :, :rotary] = q.to(dtype).to(a["q"].dtype)[valid, :, :rotary]
            if a["write_k"]:
                a["k"][valid, :, :rotary] = rounded_k[valid, :, :rotary]

        return run

    return make


fault(ROPE, r"q\[.*times the allowed error")(named("double_rounding_through_fp16", _through(torch.float16)))


@calling(ROPE, r"q\[.*times the allowed error")
def accumulates_in_bf16(good: Any, **a: Any) -> None:
    if a["q"].dtype == torch.bfloat16 and not a["interleaved"] and a["q"].shape[0]:
        cos_sin = a["cos_sin_cache"].bfloat16()
        rows = a["positions"].clamp(0, max(cos_sin.shape[0] - 1, 0)).long()
        half = cos_sin.shape[1] // 2
        cos, sin = cos_sin[rows].unsqueeze(1).chunk(2, dim=-1)
        x, y = a["q"][..., :half].clone(), a["q"][..., half : 2 * half].clone()
        good(**a)
        a["q"][..., :half], a["q"][..., half : 2 * half] = x * cos - y * sin, y * cos + x * sin
    else:
        good(**a)


@calling(ROPE, r"k_cache\[.*times the allowed error")
def fp8_from_the_rounded_k(good: Any, **a: Any) -> None:
    if a["k_cache"] is None or a["k_cache"].dtype not in FP8:
        return good(**a)
    own = a["k"] if a["write_k"] else a["k"].clone()
    good(a["q"], own, None, a["cos_sin_cache"], a["positions"], interleaved=a["interleaved"])
    still = torch.cat(
        [torch.ones_like(a["cos_sin_cache"]).chunk(2, 1)[0], torch.zeros_like(a["cos_sin_cache"]).chunk(2, 1)[0]], dim=1
    )
    good(**{**a, "q": a["q"].clone(), "k": own.clone(), "cos_sin_cache": still})
    return None


def _fits(a: dict[str, Any]) -> torch.Tensor:
    # Where the product does not fit 31 bits, a kernel would write far below the cache.
    return torch.where(a["slots"].long() * a["k_cache"].stride(0) < 2**31, a["slots"], -1)


UNWRITTEN = r"k_cache\[.*(never written|expected)|died"
simple("cache_offset_in_32_bits", UNWRITTEN, put("slots", _fits), None, "large", dies=True)


def _dense(a: dict[str, Any]) -> None:
    for name in ("k_cache", "v_cache"):
        if a[name] is not None:
            a[name] = a[name].as_strided(a[name].shape, torch.empty(a[name].shape).stride())


simple("cache_strides_ignored", r"k_cache(\[|: \d+ bytes written into the gaps)", _dense)


def _aligned(a: dict[str, Any]) -> None:
    q = a["q"]
    off = q.data_ptr() % 16 // q.dtype.itemsize
    if off:
        a["q"] = q.as_strided(q.shape, q.stride(), q.storage_offset() - off)


simple("misaligned_view_misread", r"q\[|q: \d+ bytes written", _aligned, None, "value", "misaligned")


def _last_row(a: dict[str, Any]) -> None:
    if a["slots"] is not None and size_of(a["k_cache"]):
        a["slots"] = torch.where(a["slots"] == -1, size_of(a["k_cache"]) - 1, a["slots"])


simple("minus_one_written_to_the_last_row", r"k_cache\[.*changed, though the contract does not name it", _last_row)


def _wrap_around(a: dict[str, Any]) -> None:
    if a["slots"] is not None and size_of(a["k_cache"]):
        a["slots"] = torch.where(a["slots"] == -1, -1, a["slots"] % size_of(a["k_cache"]))


simple("slot_past_the_cache_wraps_around", r"k_cache\[", _wrap_around)


def _clamp_positions(a: dict[str, Any]) -> None:
    rows = a["cos_sin_cache"].shape[0]
    if rows:
        a["positions"] = a["positions"].clamp(0, rows - 1)


simple("position_out_of_range_is_clamped", r"changed, though the contract does not name it", _clamp_positions)


@calling(ROPE, r"q\[.*times the allowed error")
def padding_rows_are_worked_on_twice(good: Any, **a: Any) -> None:
    good(**a)
    if a["slots"] is not None:
        padding = a["slots"] == -1
        q, k = a["q"][padding], a["k"][padding]
        good(q, k, None, a["cos_sin_cache"], a["positions"][padding], interleaved=a["interleaved"])
        a["q"][padding] = q


def _positions_of_slots(a: dict[str, Any]) -> None:
    if a["slots"] is not None:
        a["positions"] = torch.where(a["slots"] == -1, -1, a["positions"])


simple("padding_rows_are_not_rotated", r"q\[.*never written", _positions_of_slots)


def _mutate_v(a: dict[str, Any], kept: Any) -> None:
    if a["v"] is not None and a["v"].numel():
        a["v"].mul_(2)


simple("mutates_v", r"v\[.*changed, though the contract does not name it", lambda a: None, _mutate_v)


def _sort_slots(a: dict[str, Any], kept: Any) -> None:
    if a["slots"] is not None and a["slots"].numel() > 1:
        a["slots"].copy_(a["slots"].sort().values)


simple("sorts_the_slots_in_place", r"slots\[.*changed", lambda a: None, _sort_slots)


simple("write_k_ignored", r"k\[.*changed, though the contract does not name it", lambda a: a.update(write_k=True))


@calling(ROPE, r"nondeterministic, though declared deterministic", "determinism")
def nondeterministic(good: Any, **a: Any) -> None:
    n = a["q"].shape[0]
    order = torch.randperm(n, device=a["q"].device)
    mixed = {x: a[x][order] for x in ("q", "k", "positions")}
    mixed |= {x: a[x][order] for x in ("v", "slots") if a[x] is not None}
    good(**{**a, **mixed})
    a["q"][order] = mixed["q"]
    a["k"][order] = mixed["k"]


def _only_q_heads(a: dict[str, Any]) -> None:
    heads = a["q"].shape[1]
    for name in ("k", "v", "k_cache", "v_cache"):
        if a[name] is not None:
            a[name] = a[name][..., :heads, :]


simple("kv_heads_beyond_the_q_heads_forgotten", r"k\[.*never written", _only_q_heads)


def _drop_nan(a: dict[str, Any], kept: Any) -> None:
    valid = (a["positions"] >= 0) & (a["positions"] < a["cos_sin_cache"].shape[0])
    a["q"][valid] = a["q"][valid].nan_to_num(0.0, torch.inf, -torch.inf)


simple("nan_dropped_by_fast_math", r"q\[.*expected nan, got 0", lambda a: None, _drop_nan)


def _first_block(a: dict[str, Any]) -> None:
    for name in ("q", "k", "v", "positions", "slots"):
        if a[name] is not None:
            a[name] = a[name][:256]


simple("only_one_block_of_tokens", r"q\[.*never written", _first_block, None, "value", "sequence")


@fault(ROPE, r"q\[.*never written", "sequence", "value")
def grid_of_the_first_call_is_kept(good: Any) -> Any:
    kept: dict[Any, int] = {}

    def run(*args: Any, **kwargs: Any) -> None:
        a = get_spec(ROPE).bind(*args, **kwargs)
        n = kept.setdefault((a["q"].dtype, a["q"].shape[1:]), a["q"].shape[0])
        for name in ("q", "k", "v", "positions", "slots"):
            if a[name] is not None:
                a[name] = a[name][:n]
        good(**a)

    return run


@fault(ROPE, r"race between threads", "threads")
def rope_scratch_shared_between_threads(good: Any) -> Any:
    shared: dict[str, Any] = {}

    def run(*args: Any, **kwargs: Any) -> None:
        a = get_spec(ROPE).bind(*args, **kwargs)
        if shared.get("q") is None or shared["q"].shape != a["q"].shape:
            shared["q"] = torch.empty_like(a["q"])
        mine = shared["q"]
        mine.copy_(a["q"])
        torch.empty(1 << 12).random_()
        good(**{**a, "q": mine})
        a["q"].copy_(mine)

    return run


@fault(
    ROPE,
    r"supports says no, and .* would have run it right",
    "supports",
    supports=lambda sig: "interleaved is not there" if sig["interleaved"] else None,
)
def supports_says_no_and_would_run(good: Any) -> Any:
    return good


@fault(ROPE, r"return: expected None, got Tensor")
def returns_something(good: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        good(*args, **kwargs)
        return args[0] if args else kwargs["q"]

    return run


@fault(ROPE, r"q\[.*never written")
def rope_does_nothing_at_all(good: Any) -> Any:
    return lambda *args, **kwargs: None
