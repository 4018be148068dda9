"""Faults of MLA's writes, of the norm of q and k, and of moves within a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops._torch import store_rows
from sabotage._healthy import calling, changing, fault, spoiling
from sabotage._transfer import halves

MLA, MLA_ROPE, NORM, MOVE = "mla_kv_write", "mla_rope_kv_write", "qk_norm_rope_kv_write", "kv_move"


def undoing(op: str, message: str, part: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A fault that never writes a part of a tensor: it puts back what was in it."""

    def add(named: Callable[..., None]) -> Callable[..., Any]:
        def make(good: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> None:
                a = get_spec(op).bind(*args, **kwargs)
                view = part(a)
                view = view.view(torch.uint8) if view.dtype.itemsize == 1 else view
                was = view.clone()
                good(**a)
                view.copy_(was)

            return run

        make.__name__ = named.__name__
        return fault(op, message)(make)

    return add


# --- mla_kv_write, mla_rope_kv_write ----------------------------------------------------------------


@undoing(MLA, r"kv_cache\[.*never written", lambda a: a["kv_cache"][..., a["kv_lora"].shape[-1] :])
def the_rope_part_is_never_written() -> None: ...


@changing(MLA, r"kv_cache\[.*changed, though the contract does not name it")
def a_joint_row_at_minus_one_goes_to_the_last_slot(a: dict[str, Any]) -> None:
    cache = a["kv_cache"]
    size = cache.shape[0] * (cache.shape[1] if cache.ndim > 2 else 1)
    a["slots"] = torch.where(a["slots"] == -1, max(size - 1, 0), a["slots"]).to(a["slots"].dtype)


@changing(MLA, r"kv_cache\[.*times the allowed error")
def the_scale_of_a_joint_row_is_ignored(a: dict[str, Any]) -> None:
    a["kv_scale"] = None


@fault(MLA, r"kv_cache\[.*expected")
def the_rope_part_comes_first(good: Any) -> Any:
    return lambda kv_lora, k_rope, kv_cache, slots, *, kv_scale=None: good(
        k_rope, kv_lora, kv_cache, slots, kv_scale=kv_scale
    )


@changing(MLA_ROPE, r"kv_cache\[.*times the allowed error")
def the_row_keeps_the_unrotated_rope_part(a: dict[str, Any]) -> None:
    get_spec(MLA).reference(a["kv_lora"], a["k_rope"], a["kv_cache"], a["slots"], kv_scale=a["kv_scale"])
    a["slots"] = torch.full_like(a["slots"], -1)


@changing(MLA_ROPE, r"q_rope\[.*times the allowed error|k_rope\[.*times the allowed error")
def deepseek_s_pairs_are_rotated_as_neox_s(a: dict[str, Any]) -> None:
    a["interleaved"] = False


@changing(MLA_ROPE, r"k_rope\[.*changed, though the contract does not name it")
def k_rope_is_written_though_it_should_stay(a: dict[str, Any]) -> None:
    a["write_k"] = True


@calling(MLA_ROPE, r"^bound call: kv_cache\[.*times the allowed error")
def only_the_latent_part_is_scaled(good: Any, **a: Any) -> None:
    copies = {x: a[x].clone() for x in ("q_rope", "k_rope", "kv_cache")}
    good(**a)
    if a["kv_scale"] is not None:
        good(**{**a, **copies, "kv_scale": None})
        lora = a["kv_lora"].shape[-1]
        a["kv_cache"].view(torch.uint8)[..., lora:] = copies["kv_cache"].view(torch.uint8)[..., lora:]


@undoing(MLA_ROPE, r"kv_cache\[.*never written", lambda a: a["kv_cache"][..., : a["kv_lora"].shape[-1]])
def the_latent_part_is_never_written() -> None: ...


# --- qk_norm_rope_kv_write --------------------------------------------------------------------------


@changing(NORM, r"q\[.*times the allowed error")
def eps_is_left_out(a: dict[str, Any]) -> None:
    a["eps"] = 1e-30


@changing(NORM, r"k\[.*times the allowed error")
def k_is_normalised_by_the_weight_of_q(a: dict[str, Any]) -> None:
    a["k_weight"] = a["q_weight"]


@changing(NORM, r"[qk]\[.*times the allowed error")
def the_norm_s_weight_is_one(a: dict[str, Any]) -> None:
    a["q_weight"], a["k_weight"] = torch.ones_like(a["q_weight"]), torch.ones_like(a["k_weight"])


@calling(NORM, r"q\[.*times the allowed error")
def normalised_over_the_token_instead_of_the_head(good: Any, **a: Any) -> None:
    squares = a["q"].float().square().mean(-1, keepdim=True)
    wrong = ((squares + a["eps"]) / (squares.mean(-2, keepdim=True) + a["eps"])).sqrt()
    good(**a)
    valid = ((a["positions"] >= 0) & (a["positions"] < a["cos_sin_cache"].shape[0])).view(-1, 1, 1)
    a["q"].copy_(torch.where(valid, (a["q"].float() * wrong).to(a["q"].dtype), a["q"]))


@fault(NORM, r"[qk]\[.*times the allowed error")
def rounded_between_the_norm_and_the_rotation(good: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        a = get_spec(NORM).bind(*args, **kwargs)
        valid = ((a["positions"] >= 0) & (a["positions"] < a["cos_sin_cache"].shape[0])).view(-1, 1, 1)
        k = a["k"] if a["write_k"] else a["k"].clone()
        for x, weight in ((a["q"], a["q_weight"]), (k, a["k_weight"])):
            y = x.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + a["eps"]) * weight.float()
            x.copy_(torch.where(valid, y.to(x.dtype), x))
        rope = {n: a[n] for n in get_spec("rope_kv_write").args}
        get_spec("rope_kv_write").reference(**{**rope, "k": k})

    return run


@fault(NORM, r"k_cache\[.*times the allowed error")
def the_cache_gets_k_without_its_norm(good: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        a = get_spec(NORM).bind(*args, **kwargs)
        rope = {n: a[n] for n in get_spec("rope_kv_write").args} | {"q": a["q"].clone(), "k": a["k"].clone()}
        good(**a)
        if a["k_cache"] is not None:
            get_spec("rope_kv_write").reference(**rope)

    return run


# --- kv_move ----------------------------------------------------------------------------------------


def _one_pair(a: dict[str, Any], i: int) -> dict[str, Any]:
    return {**a, "src_slots": a["src_slots"][i : i + 1], "dst_slots": a["dst_slots"][i : i + 1]}


@calling(MOVE, r"pool\.k\[.*expected")
def moved_one_pair_after_the_other(good: Any, **a: Any) -> None:
    for i in range(a["src_slots"].shape[0]):
        good(**_one_pair(a, i))


@calling(MOVE, r"pool\.k\[.*expected")
def moved_from_the_last_pair_to_the_first(good: Any, **a: Any) -> None:
    for i in reversed(range(a["src_slots"].shape[0])):
        good(**_one_pair(a, i))


@calling(MOVE, r"pool\.k\[.*expected")
def gathered_in_blocks_of_256_pairs(good: Any, **a: Any) -> None:
    for i in range(0, a["src_slots"].shape[0], 256):
        block = {x: a[x][i : i + 256] for x in ("src_slots", "dst_slots")}
        good(**{**a, **block})


@changing(MOVE, r"pool\.v.*(never written|expected)")
def v_does_not_move(a: dict[str, Any]) -> None:
    pool = a["pool"]
    a["pool"] = KVPool(pool.k, None, layout=pool.layout, page_size=pool.page_size)


@changing(MOVE, r"pool\.k.*changed, though the contract does not name it")
def moves_in_all_layers(a: dict[str, Any]) -> None:
    a["layers"] = None


@spoiling(MOVE, r"pool\.k.*expected|pool\.k.*changed")
def a_pair_without_a_source_clears_its_target(a: dict[str, Any], found: Any) -> None:
    pool = a["pool"]
    if pool.layout != "layer_first" or isinstance(pool.k, tuple):
        return
    d = a["dst_slots"]
    none = (a["src_slots"] < 0) & (d >= 0) & (d < pool.num_slots)
    for half in halves(pool):
        for layer in half:
            store_rows(layer, d, none, torch.zeros_like(layer[:1]).expand(d.shape[0], *layer.shape[1:]))


@spoiling(MOVE, r"workspace: \d+ bytes written outside the tensor")
def the_workspace_is_taken_to_hold_all_layers(a: dict[str, Any], found: Any) -> None:
    work, pool = a["workspace"], a["pool"]
    need = a["src_slots"].shape[0] * pool.planes()[0].row_bytes * pool.num_layers
    if 0 < work.shape[0] < need:
        # One byte past the end is enough to be seen, and harms nobody.
        torch.as_strided(work, (1,), (1,), work.storage_offset() + work.shape[0]).fill_(0x33)


@spoiling(MOVE, r"src_slots\[\d+\]: changed")
def sorts_the_pairs_in_place(a: dict[str, Any], found: Any) -> None:
    a["src_slots"].copy_(a["src_slots"].sort().values)


@fault(MOVE, r"pool\.k.*(never written|expected)")
def moves_nothing_at_all(good: Any) -> Any:
    return lambda *args, **kwargs: None
