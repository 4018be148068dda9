"""Faults of decode_attention and extend_attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hal.ops import _attention, get_spec
from hal.ops._torch import in_range
from sabotage._healthy import calling, fault
from sabotage._kv import changing

DECODE, EXTEND = "decode_attention", "extend_attention"
OUT = r"^(bound|dispatched) call: (out|return)\[.*times the allowed error"
LSE = r"^(bound|dispatched) call: lse\["


def ranged(see: Callable[[dict[str, Any], Any, Any, Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """make: an extend_attention of its own, whose queries see what ``see(arguments, first, last, own, place)`` says:
    where the request begins and ends, the end of what the query should see, and the query's place in its request."""

    def make(good: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            a = get_spec(EXTEND).bind(*args, **kwargs)
            n, nnz = a["q"].shape[0], a["kv_indices"].shape[0]
            begin, stop = _attention.bounds(a["qo_indptr"], n)
            start, end = _attention.bounds(a["kv_indptr"], nnz)
            t = torch.arange(n, device=a["q"].device)
            mine = (t.view(-1, 1) >= begin) & (t.view(-1, 1) < stop)
            if not mine.shape[1] or a["sliding_window"] >= 0:
                return good(**a)
            owned, owner = mine.any(dim=1), mine.to(torch.int8).argmax(dim=1)
            own = end[owner] - (stop[owner] - t) + 1
            first, last = see(a, start[owner], end[owner], own, t - begin[owner])
            cut = ("q", "k_cache", "v_cache", "kv_indices")
            rest = ("scale", "logit_cap", "k_scale", "v_scale")
            found, sums = _attention.reference(
                *(a[x] for x in cut), first, last if a["causal"] else end[owner], *(a[x] for x in rest)
            )
            found = found.to(a["q"].dtype)
            if a["lse"] is not None:
                a["lse"].copy_(torch.where(owned.view(-1, 1), sums, a["lse"]))
            return found if a["out"] is None else a["out"].copy_(torch.where(owned.view(-1, 1, 1), found, a["out"]))

        return run

    make.__name__ = see.__name__
    return make


# --- decode_attention -------------------------------------------------------------------------------


@changing(DECODE, OUT)
def logits_are_not_scaled(a: dict[str, Any]) -> None:
    a["scale"] = 1.0


@changing(DECODE, OUT)
def the_window_is_ignored(a: dict[str, Any]) -> None:
    a["sliding_window"] = -1


@changing(DECODE, OUT)
def the_window_counts_the_token_itself(a: dict[str, Any]) -> None:
    # Hugging Face's way of counting.
    if a["sliding_window"] > 0:
        a["sliding_window"] -= 1


@changing(DECODE, OUT)
def the_logit_cap_is_ignored(a: dict[str, Any]) -> None:
    a["logit_cap"] = 0.0


@changing(DECODE, OUT)
def the_logits_are_capped_before_they_are_scaled(a: dict[str, Any]) -> None:
    if a["logit_cap"]:
        # c tanh(x / c) * s is (c s) tanh(x s / (c s)).
        a["logit_cap"] = a["logit_cap"] * a["scale"]


@changing(DECODE, OUT)
def the_last_split_is_forgotten(a: dict[str, Any]) -> None:
    begin, end = _attention.bounds(a["kv_indptr"], a["kv_indices"].shape[0])
    slots = a["kv_indices"].clone()
    for i, j in zip(begin.tolist(), end.tolist(), strict=True):
        if j - i > 512:
            slots[i + (j - i) // 512 * 512 : j] = -1
    a["kv_indices"] = slots


@changing(DECODE, OUT)
def the_scale_of_v_is_ignored(a: dict[str, Any]) -> None:
    a["v_scale"] = None


@changing(DECODE, OUT)
def the_scale_of_k_is_ignored(a: dict[str, Any]) -> None:
    a["k_scale"] = None


@changing(DECODE, OUT)
def minus_one_is_read_as_slot_0(a: dict[str, Any]) -> None:
    if a["k_cache"].shape[0]:
        a["kv_indices"] = torch.where(a["kv_indices"] == -1, 0, a["kv_indices"])


@changing(DECODE, rf"{OUT}|^bound call: out\[.*got nan")
def the_page_of_a_slot_is_found_by_a_power_of_two(a: dict[str, Any]) -> None:
    if a["k_cache"].ndim == 4:
        page, slots = a["k_cache"].shape[1], a["kv_indices"]
        wrong = slots // (1 << (page - 1).bit_length()) * page + slots % page
        valid = in_range(slots, _attention.count_slots(a["k_cache"]))
        a["kv_indices"] = torch.where(valid, wrong, slots).to(slots.dtype)


@calling(DECODE, OUT)
def query_heads_take_turns_at_the_kv_heads(good: Any, **a: Any) -> Any:
    heads, kv_heads = a["q"].shape[1], a["k_cache"].shape[-2]
    # Head h reads kv head h % kv_heads: sorted by that, the healthy mapping is this one.
    order = torch.arange(heads, device=a["q"].device).view(-1, kv_heads).t().reshape(-1)
    out = torch.empty(*a["q"].shape[:2], a["v_cache"].shape[-1], dtype=a["q"].dtype, device=a["q"].device)
    lse = None if a["lse"] is None else torch.empty_like(a["lse"])
    good(**{**a, "q": a["q"][:, order].contiguous(), "out": out, "lse": lse})
    if lse is not None:
        a["lse"][:, order] = lse
    given = torch.empty_like(out) if a["out"] is None else a["out"]
    given[:, order] = out
    return given


@calling(DECODE, r"^(bound|dispatched) call: (out|return)\[.*expected .*, got (nan|inf)")
def softmax_without_its_maximum(good: Any, **a: Any) -> Any:
    lse = torch.empty(a["q"].shape[:2], device=a["q"].device)
    out = good(**{**a, "lse": lse})
    # exp(88.8) is too large for fp32; so is then the sum, and the quotient of two infinities is NaN.
    out.masked_fill_((lse > math.log(torch.finfo(torch.float32).max)).unsqueeze(-1), torch.nan)
    if a["lse"] is not None:
        a["lse"].copy_(lse)
    return out


@calling(DECODE, LSE)
def the_lse_lacks_the_maximum(good: Any, **a: Any) -> Any:
    out = good(**a)
    if a["lse"] is None:
        return out
    begin, end = _attention.bounds(a["kv_indptr"], a["kv_indices"].shape[0])
    valid = in_range(a["kv_indices"], _attention.count_slots(a["k_cache"]))
    k = _attention.gather(a["k_cache"], a["kv_indices"], valid)
    group = a["q"].shape[1] // k.shape[1]
    for i, (b, e) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        if e > b:
            seen = k[b:e].repeat_interleave(group, dim=1)
            a["lse"][i] -= ((a["q"][i].float() * seen).sum(-1) * a["scale"]).amax(0)
    return out


@calling(DECODE, LSE)
def the_lse_is_in_base_2(good: Any, **a: Any) -> Any:
    out = good(**a)
    if a["lse"] is not None:
        a["lse"].mul_(math.log2(math.e))
    return out


@calling(DECODE, OUT)
def splits_are_merged_without_their_weights(good: Any, **a: Any) -> Any:
    begin, end = _attention.bounds(a["kv_indptr"], a["kv_indices"].shape[0])
    if a["sliding_window"] >= 0 or not bool((end - begin > 600).any()):
        return good(**a)
    parts = []
    for half in (0, 1):
        slots = a["kv_indices"].clone()
        for i, j in zip(begin.tolist(), end.tolist(), strict=True):
            middle = i + (j - i) // 2
            slots[i:middle] = -1 if half else slots[i:middle]
            slots[middle:j] = slots[middle:j] if half else -1
        parts.append(good(**{**a, "kv_indices": slots, "out": None, "lse": None}).float())
    out = good(**a)
    return out.copy_((parts[0] + parts[1]) / 2)


@calling(DECODE, OUT)
def float32_is_rounded_to_tf32(good: Any, **a: Any) -> Any:
    if a["q"].dtype == torch.float32:
        # The last 13 bits of the mantissa are what the tensor cores leave out.
        a["q"] = ((a["q"].contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return good(**a)


@calling(DECODE, r"^(bound|dispatched) call: (out|return)\[.*expected 0, got nan")
def nothing_to_see_gives_nan(good: Any, **a: Any) -> Any:
    lse = torch.empty(a["q"].shape[:2], device=a["q"].device)
    out = good(**{**a, "lse": lse})
    if a["lse"] is not None:
        a["lse"].copy_(lse)
    return out.masked_fill_((lse == -torch.inf).unsqueeze(-1), torch.nan)


# --- extend_attention -------------------------------------------------------------------------------


@fault(EXTEND, OUT)
@ranged
def a_query_does_not_see_itself(a: Any, first: Any, last: Any, own: Any, place: Any) -> tuple[Any, Any]:
    return first, torch.maximum(first, own - 1)


@fault(EXTEND, OUT)
@ranged
def a_query_sees_the_token_after_it(a: Any, first: Any, last: Any, own: Any, place: Any) -> tuple[Any, Any]:
    return first, torch.minimum(last, own + 1)


@fault(EXTEND, OUT)
@ranged
def positions_begin_at_the_new_tokens(a: Any, first: Any, last: Any, own: Any, place: Any) -> tuple[Any, Any]:
    return first, torch.minimum(last, first + place + 1)


@fault(EXTEND, OUT)
@ranged
def the_prefix_is_not_seen(a: Any, first: Any, last: Any, own: Any, place: Any) -> tuple[Any, Any]:
    return torch.maximum(first, own - 1 - place), own


@changing(EXTEND, OUT)
def always_causal(a: dict[str, Any]) -> None:
    a["causal"] = True


@changing(EXTEND, OUT)
def the_window_of_an_extend_is_ignored(a: dict[str, Any]) -> None:
    a["sliding_window"] = -1


@changing(EXTEND, OUT)
def the_scale_of_v_in_an_extend_is_ignored(a: dict[str, Any]) -> None:
    a["v_scale"] = None


@changing(EXTEND, OUT)
def mla_reads_v_from_the_end_of_the_row(a: dict[str, Any]) -> None:
    k, v = a["k_cache"], a["v_cache"]
    if v.data_ptr() == k.data_ptr() and v.shape[-1] < k.shape[-1]:
        a["v_cache"] = k[..., k.shape[-1] - v.shape[-1] :]


@calling(EXTEND, r"out\[.*changed, though the contract does not name it")
def rows_of_no_request_are_cleared(good: Any, **a: Any) -> Any:
    out = good(**a)
    begin, stop = _attention.bounds(a["qo_indptr"], a["q"].shape[0])
    t = torch.arange(a["q"].shape[0], device=out.device).view(-1, 1)
    owned = ((t >= begin) & (t < stop)).any(dim=1)
    return out.masked_fill_(~owned.view(-1, 1, 1), 0)
