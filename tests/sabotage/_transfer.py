"""Faults of kv_transfer."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from hal.kv.pool import KVPool
from hal.ops import get_spec
from sabotage import _healthy
from sabotage._healthy import calling, fault

COPY = "kv_transfer"


changing = functools.partial(_healthy.changing, COPY)


def halves(pool: KVPool) -> list[Any]:
    return [h for h in (pool.k, pool.v) if h is not None]


@changing(r"dst\.k.*never written")
def one_layer_missed(a: dict[str, Any]) -> None:
    layers = range(a["src"].num_layers) if a["layers"] is None else a["layers"]
    a["layers"] = layers[:-1] if len(layers) > 1 else layers


@changing(r"dst\.k.*changed, though the contract does not name it")
def layer_range_ignored(a: dict[str, Any]) -> None:
    a["layers"] = None


@changing(r"dst\.k.*never written")
def last_page_forgotten(a: dict[str, Any]) -> None:
    n = a["src_slots"].shape[0]
    whole = n - n % a["src"].page_size
    a["src_slots"], a["dst_slots"] = a["src_slots"][:whole], a["dst_slots"][:whole]


@changing(r"dst\.k.*never written")
def of_megabytes_the_last_pair_is_dropped(a: dict[str, Any]) -> None:
    src, n = a["src"], a["src_slots"].shape[0]
    if n * src.num_layers * src.planes()[0].row_bytes >= 4 << 20:
        a["src_slots"], a["dst_slots"] = a["src_slots"][: n - 1], a["dst_slots"][: n - 1]


@changing(r"dst\.k.*expected")
def source_off_by_one_slot(a: dict[str, Any]) -> None:
    slots, size = a["src_slots"], a["src"].num_slots
    a["src_slots"] = torch.where((slots >= 0) & (slots < size), (slots + 1) % max(size, 1), slots)


@changing(r"dst\.k.*(changed, though the contract does not name it|expected)")
def source_minus_one_is_the_last_slot(a: dict[str, Any]) -> None:
    a["src_slots"] = torch.where(a["src_slots"] == -1, a["src"].num_slots - 1, a["src_slots"])


@changing(r"dst\.k.*(changed, though the contract does not name it|expected)")
def target_slot_wraps_around(a: dict[str, Any]) -> None:
    if a["dst"].num_slots:
        a["dst_slots"] = torch.where(a["dst_slots"] == -1, -1, a["dst_slots"] % a["dst"].num_slots)


@changing(r"dst\.v.*never written")
def transfers_no_v(a: dict[str, Any]) -> None:
    for name in ("src", "dst"):
        pool = a[name]
        a[name] = KVPool(pool.k, None, layout=pool.layout, page_size=pool.page_size)


@changing(r"they are what dst\.v should hold")
def transfers_k_and_v_swapped(a: dict[str, Any]) -> None:
    pool = a["dst"]
    if pool.v is not None and pool.row_shape == pool.v_row_shape:
        a["dst"] = KVPool(pool.v, pool.k, layout=pool.layout, page_size=pool.page_size)


@calling(COPY, r"dst\.k\[.*expected")
def layout_pair_transposed(good: Any, **a: Any) -> None:
    good(**a)
    dst = a["dst"]
    if a["src"].layout == "layer_first" and dst.layout == "page_first" and dst.num_layers > 1:
        for half in halves(dst):
            # Layers in the order of the source's strides, not of the target's.
            slots = [int(s) for s in a["dst_slots"] if 0 <= s < dst.num_slots]
            half[slots] = half[slots].flip(1)


@calling(COPY, r"dst\.k\[.*changed, though the contract does not name it")
def copies_whole_pages(good: Any, **a: Any) -> None:
    good(**a)
    dst = a["dst"]
    ok = [int(s) for s in a["dst_slots"] if 0 <= s < dst.num_slots]
    if ok and dst.page_size > 1 and dst.layout == "page_first":
        page = ok[0] // dst.page_size * dst.page_size
        for half in halves(dst):
            half.view(torch.uint8)[page : page + dst.page_size].fill_(0x21)


@calling(COPY, r"dst\.[kv].*expected")
def moves_values_instead_of_bits(good: Any, **a: Any) -> None:
    good(**a)
    dst = a["dst"]
    layers = range(dst.num_layers) if a["layers"] is None else a["layers"]
    if dst.dtype in (torch.float16, torch.bfloat16) and dst.layout == "page_first":
        slots = [int(s) for s in a["dst_slots"] if 0 <= s < dst.num_slots]
        for half in halves(dst):
            rows = half[slots, layers.start : layers.stop]
            half[slots, layers.start : layers.stop] = torch.where(rows.isnan(), torch.full_like(rows, torch.nan), rows)


@calling(COPY, r"dst\.k\[.*never written")
def rows_cut_to_whole_words(good: Any, **a: Any) -> None:
    dst = a["dst"]
    row = dst.planes()[0].chunk_bytes
    if row % 4 == 0 or dst.layout != "page_first":
        return good(**a)
    before = [h.view(torch.uint8).clone() for h in halves(dst)]
    good(**a)
    for half, was in zip(halves(dst), before, strict=True):
        half.view(torch.uint8)[..., row // 4 * 4 :] = was[..., row // 4 * 4 :]
    return None


@calling(COPY, r"dst\.k\[\d+\].*expected|dst\.k\[\d+\]: .*changed|dst\.k\[\d+\]\[")
def layer_list_taken_for_one_tensor(good: Any, **a: Any) -> None:
    dst = a["dst"]
    if isinstance(dst.k, tuple) and len(dst.k) > 1:
        # The second layer's pointer stands for all that follow.
        a["dst"] = KVPool(
            [dst.k[0], *[dst.k[1]] * (len(dst.k) - 1)],
            None if dst.v is None else [dst.v[0], *[dst.v[1]] * (len(dst.k) - 1)],
        )
    good(**a)


@calling(COPY, r"supports said yes, and the (bound|dispatched) call raised")
def page_head_declared_and_not_there(good: Any, **a: Any) -> None:
    if "page_head" in (a["src"].layout, a["dst"].layout):
        raise NotImplementedError("page_head")
    good(**a)


@calling(COPY, r"src\.k.*changed, though the contract does not name it")
def moves_instead_of_copying(good: Any, **a: Any) -> None:
    good(**a)
    src = a["src"]
    for slot in (int(s) for s in a["src_slots"] if 0 <= s < src.num_slots):
        if src.layout == "layer_first" and not isinstance(src.k, tuple):
            src.k.view(torch.uint8)[:, slot] = 0


@fault(COPY, r"race between threads", "threads")
def transfer_staging_shared_between_threads(good: Any) -> Any:
    shared: dict[str, Any] = {}

    def run(*args: Any, **kwargs: Any) -> None:
        a = get_spec(COPY).bind(*args, **kwargs)
        shared["slots"] = a["dst_slots"]
        time.sleep(1e-3)  # what is staged takes its time: on busy cores no thread comes into a few microseconds
        good(**{**a, "dst_slots": shared["slots"]})

    return run


@calling(COPY, r"dst\.k.*(never written|expected)|died", "large", dies=True)
def transfer_offset_in_32_bits(good: Any, **a: Any) -> None:
    stride = a["dst"].planes()[0].token_stride
    fits = (a["dst_slots"] >= 0) & (a["dst_slots"] < 2**20) & (a["dst_slots"] * stride < 2**31)
    good(**{**a, "dst_slots": torch.where(fits, a["dst_slots"], -1)})


@fault(COPY, r"dst\.k.*never written")
def transfer_does_nothing_at_all(good: Any) -> Any:
    return lambda *args, **kwargs: None
