"""The shapes at which kernels are counted: those of real models, a step's worth of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hal.backends.ascend import _shapes


@dataclass(frozen=True)
class Case:
    """One shape of one op: its arguments, the least bytes that they take, the arithmetic that can't be left out."""

    op: str
    name: str
    make: Callable[[], dict[str, Any]]
    needed: Callable[[dict[str, Any]], int]
    flops: Callable[[dict[str, Any]], int] = lambda a: 0


LISTS = tuple(
    """
    get_last_loc assign_extend_cache_locs write_req_to_token compute_positions build_kv_indices
    build_kv_indices_from_blocks build_page_table alloc_extend alloc_decode kv_move kv_transfer
    """.split()
)
_LISTED = {
    "build_kv_indices_from_blocks": "bs64-i32-page128",
    "build_page_table": "bs64-i32-page64",
    "alloc_extend": "bs64-i64-page128",
    "alloc_decode": "bs256-i64",
    "kv_move": "mha-8x128-layer_first-page1",
    "kv_transfer": "mha-8x128-layer_first-page_first-page16",
}
HEADS = {"llama-3-8b": (32, 8, 128), "qwen3-30b-a3b": (32, 4, 128)}
MLA = {"deepseek-128-heads": 128, "deepseek-16-heads": 16}
PAGE = 128


def cases() -> Iterator[Case]:
    """Every op of the backend, at least once."""
    from hal.ops import get_spec

    # Those that move lists of slots know no heads: their shapes are those that `hal inspect` holds.
    listed = {op: _LISTED.get(op, "bs256-i32" if op == "get_last_loc" else "bs64-i32") for op in LISTS}
    for case in _shapes.cases():
        if listed.get(case.op) == case.name:
            yield Case(case.op, case.name, case.make, case.needed)

    def of(op: str, name: str, needed: Any, flops: Any = None, **params: Any) -> Case:
        def make() -> dict[str, Any]:
            args = get_spec(op).make(dtype="bf16", cache="paged", page_size=PAGE, **params)
            return in_pages(args, params) if flops else args

        return Case(op, name, make, needed, flops or (lambda a: 0))

    tokens = {"n": 256, "slots": 4096}
    for name, (q_heads, kv_heads, head_dim) in HEADS.items():
        kv = {"kv_heads": kv_heads, "head_dim": head_dim}
        heads = {**kv, "q_heads": q_heads}
        yield of("kv_write", f"{name}-256", _shapes._bytes_of_write, **tokens, **kv)
        yield of("rope_kv_write", f"{name}-256", _shapes._rope, **tokens, **heads)
        if "qwen" in name:
            yield of("qk_norm_rope_kv_write", f"{name}-256", _shapes._bytes_of_norm_rope, **tokens, **heads)
        yield of(
            "decode_attention", f"{name}-8x2048", _shapes._bytes_of_attention, flops_of, **_decode(8, 2048), **heads
        )
        yield of(
            "extend_attention", f"{name}-256+1792", _shapes._bytes_of_attention, flops_of, **_extend(256, 1792), **heads
        )
    rows = {**tokens, "lora_dim": 512, "rope_dim": 64}
    yield of("mla_kv_write", "deepseek-256", _shapes._bytes_of_mla_write, **rows)
    for name, q_heads in MLA.items():
        yield of(
            "mla_rope_kv_write", f"{name}-256", _shapes._bytes_of_mla_write, **rows, q_heads=q_heads, interleaved=True
        )
        mla = {"q_heads": q_heads, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared"}
        yield of("decode_attention", f"{name}-8x2048", _shapes._bytes_of_attention, flops_of, **_decode(8, 2048), **mla)
        yield of(
            "extend_attention", f"{name}-64+1984", _shapes._bytes_of_attention, flops_of, **_extend(64, 1984), **mla
        )


def _decode(bs: int, context: int) -> dict[str, Any]:
    return {"bs": bs, "longest": context, "lengths": "full", "slots": bs * context}


def _extend(new: int, prefix: int) -> dict[str, Any]:
    return {"bs": 1, "longest": new, "prefix": prefix, "lengths": "full", "slots": new + prefix}


def in_pages(args: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """`args` with each request's slots in whole pages, as engines give them out: in order inside a page."""
    import torch

    indices = args["kv_indices"]
    pages = torch.arange(params["slots"] // PAGE, dtype=torch.int64, device="cpu").flip(0)
    slots = (pages[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int64, device="cpu")).flatten()
    return {**args, "kv_indices": slots[: indices.shape[0]].to(indices.dtype)}


def flops_of(a: dict[str, Any]) -> int:
    """Of both products of attention, over the pairs of a token and an entry that it sees."""
    lens = a["kv_indptr"].diff()
    if "qo_indptr" in a:
        new = a["qo_indptr"].diff()
        pairs = int((new * lens - new * (new - 1) // 2).sum())
    else:
        pairs = int(lens.sum())
    return 2 * pairs * int(a["q"].shape[1]) * (int(a["q"].shape[2]) + int(a["v_cache"].shape[-1]))
