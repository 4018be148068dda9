"""vLLM's rotary embedding on hal: its classes, derived, with `rope_kv_write` as their forward.

Eager, q and k are rotated in place, as vLLM's own CUDA form does. In a graph that is compiled the rotation is an op
without side effects, `hal_vllm::rope`; hal's pass (`fuse`) makes it one with the write of the cache, or one in place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding as vllm_rotary
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope_interleaved import MRotaryEmbeddingInterleaved
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

import hal
from hal.engines import EngineError
from hal.engines._mrope import axes_of, rows_of_tokens
from hal.engines.vllm import limits
from hal.registry._table import live

BY_AXES: tuple[type, ...] = MRotaryEmbedding, MRotaryEmbeddingInterleaved
LIBRARY = torch.library.Library("hal_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]


class HalRotary:
    """What hal's classes do in place of vLLM's; the tables are those that vLLM's class makes."""

    cos_sin_cache: Tensor
    head_size: int
    is_neox_style: bool
    _match_cos_sin_cache_dtype: Any

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if offsets is not None:
            positions = positions + offsets
        table = self.cos_sin_cache
        if table.dtype not in (torch.float32, query.dtype) or table.device != query.device:
            table = self._match_cos_sin_cache_dtype(query)
        table, positions = self._rows(table, positions)
        arguments = positions, query, key, table, self.head_size, self.is_neox_style
        if not torch.compiler.is_compiling():
            rotate(*arguments)
            return query, key
        if key is None:
            return torch.ops.hal_vllm.rope_q(*arguments[:2], *arguments[3:]), None
        q, k = torch.ops.hal_vllm.rope(*arguments)
        return q, k

    def _rows(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The table to rotate by, and each token's row of it."""
        return table, positions.flatten()


class HalMRotary(HalRotary):
    """With a position for each axis of an image or a film."""

    mrope_section: list[int] | None
    mrope_interleaved: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One class has made the list already, by an order of its own.
        axes = getattr(self, "mrope_dim", None) or 2 * axes_of(self.mrope_section or (), self.mrope_interleaved)
        device = self.cos_sin_cache.device
        self.axes: Tensor
        self.register_buffer("axes", torch.tensor(axes, dtype=torch.int64, device=device), persistent=False)

    register_buffer: Any

    def _rows(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.ndim == 1:
            return table, positions
        return rows_of_tokens(table, positions, self.axes)


LONG = "Phi3LongRoPEScaledRotaryEmbedding"
"""vLLM's class with two tables, one after the other in one buffer: it makes this one itself, by no plugin's leave."""


class HalPhi3LongRoPEScaledRotaryEmbedding(HalRotary, Phi3LongRoPEScaledRotaryEmbedding):
    """LongRoPE (arXiv:2402.13753) as vLLM has it: the model's longest context chooses the table, once.

    So `cos_sin_cache` is that table alone, a view, and positions count from its beginning.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        both, short = self.long_short_cos_sin_cache, self.original_max_position_embeddings
        self.register_buffer("cos_sin_cache", both[short:] if self.use_long_rope else both[:short], persistent=False)
        self.is_neox_style = True

    def _match_cos_sin_cache_dtype(self, query: Tensor) -> Tensor:
        self.cos_sin_cache = self.cos_sin_cache.to(query.device, query.dtype)
        return self.cos_sin_cache


def classes() -> dict[str, type]:
    """hal's class by the name of the vLLM class that it takes the place of: all that rotate as `RotaryEmbedding` does.

    Raises:
        EngineError: the place is taken, or vLLM's classes are not as they were.
    """
    if not isinstance(getattr(vllm_rotary, "_ROPE_DICT", None), dict):
        raise EngineError("hal: vllm can't run on hal: vllm.…rotary_embedding._ROPE_DICT is not the table it was")
    if not issubclass(getattr(vllm_rotary, LONG, object), Phi3LongRoPEScaledRotaryEmbedding):
        raise EngineError(f"hal: vllm can't run on hal: vllm.…rotary_embedding.{LONG} is not the class it was")
    known: list[type] = [RotaryEmbedding, *_below(RotaryEmbedding)]
    same: list[type] = list(filter(_plain, known))
    same += [DeepseekScalingRotaryEmbedding, *BY_AXES]
    taken = [c.__name__ for c in same if c.__name__ in op_registry_oot]
    if taken:
        raise EngineError(f"hal: vllm can't run on hal: another plugin stands in for {', '.join(taken)} already")
    return {
        c.__name__: type(f"Hal{c.__name__}", (HalMRotary if c in BY_AXES else HalRotary, c), {"__module__": __name__})
        for c in same
    }


def _below(cls: type) -> list[type]:
    found: list[type] = []
    c: type
    for c in cls.__subclasses__():
        found += [c, *_below(c)]
    return found


def _plain(cls: type) -> bool:
    """Does it rotate as its base does, by a table that may be another?"""
    names = ("forward", "forward_native", "forward_static", "forward_cuda", "forward_cpu", "_match_cos_sin_cache_dtype")
    return all(getattr(cls, n, None) is getattr(RotaryEmbedding, n, None) for n in names)


def register(found: dict[str, type]) -> None:
    """Makes vLLM build these; what `classes` returned."""
    for name, cls in found.items():
        CustomOp.register_oot(name=name)(cls)
    setattr(vllm_rotary, LONG, HalPhi3LongRoPEScaledRotaryEmbedding)


def check_instances() -> None:
    """Every rotary embedding that vLLM has made so far is hal's.

    Raises:
        EngineError: one is of a kind that hal's op does not do.
    """
    for made in vllm_rotary._ROPE_DICT.values():
        kind = type(made).__name__
        if not isinstance(made, HalRotary) and "Vision" not in kind:
            raise limits.refusal(
                [
                    f"{kind}, a rotary embedding that hal has not — --attention-backend CUSTOM without HAL_ENGINES "
                    "runs the attention on hal and leaves that to vLLM"
                ]
            )


# --- the ops of a compiled graph --------------------------------------------------------------------


def rotate(positions: Tensor, query: Tensor, key: Tensor | None, table: Tensor, head_size: int, is_neox: bool) -> None:
    """Rotates query and key, ``[n, heads * head_size]`` or ``[n, heads, head_size]``, in place."""
    n = query.shape[0]
    q = query.view(n, -1, head_size)
    k = q[:, :0] if key is None else key.view(n, -1, head_size)
    # By the table of backends: another one after `hal.reload`, which may choose otherwise.
    run = _bound(
        live.current(), q.device, q.dtype, q.shape[1], k.shape[1], head_size, table.dtype, table.shape[1], is_neox
    )
    run(q, k, None, table, positions, interleaved=not is_neox)


@functools.lru_cache(maxsize=64)
def _bound(
    backends: object,
    device: torch.device,
    dtype: torch.dtype,
    q_heads: int,
    k_heads: int,
    head_size: int,
    table: torch.dtype,
    rotary_dim: int,
    is_neox: bool,
) -> Any:
    q = torch.zeros(1, q_heads, head_size, dtype=dtype, device=device)
    k = torch.zeros(1, k_heads, head_size, dtype=dtype, device=device)
    cos_sin = torch.zeros(1, rotary_dim, dtype=table, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    example = {"q": q, "k": k, "v": None, "cos_sin_cache": cos_sin, "positions": position, "interleaved": not is_neox}
    return hal.bind(device, like={"rope_kv_write": example}).rope_kv_write


def rope(
    positions: Tensor, query: Tensor, key: Tensor, table: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    q, k = (query.clone(memory_format=torch.contiguous_format), key.clone(memory_format=torch.contiguous_format))
    rotate(positions, q, k, table, head_size, is_neox)
    return q, k


def rope_q(positions: Tensor, query: Tensor, table: Tensor, head_size: int, is_neox: bool) -> Tensor:
    q = query.clone(memory_format=torch.contiguous_format)
    rotate(positions, q, None, table, head_size, is_neox)
    return q


def rope_(positions: Tensor, query: Tensor, key: Tensor, table: Tensor, head_size: int, is_neox: bool) -> None:
    rotate(positions, query, key, table, head_size, is_neox)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


direct_register_custom_op("rope", rope, [], lambda _, q, k, *others: (_empty(q), _empty(k)), LIBRARY)
direct_register_custom_op("rope_q", rope_q, [], lambda _, q, *others: _empty(q), LIBRARY)
direct_register_custom_op("rope_", rope_, ["query", "key"], lambda *all_of_it: None, LIBRARY)
