"""What a forward pass knows of its keys, made once a step and once a kind of layer: in place of the 4-D mask.

transformers asks for a mask where a step begins and hands it to every layer. Ours has no elements; it carries a `Step`,
which says by slots what each request may see. Keys that padding hides are -1 in the list of slots: the position counts,
the key is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hal
from hal.engines._engine import EngineError

READS_NOTHING = frozenset({"__get__", "contiguous", "dim", "size", "to", "__repr__", "__format__"})


class StepMask(Tensor):
    """A 4-D mask without elements. Attention that is not hal's can't use it, and is told so."""

    step: Step

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in READS_NOTHING:
            raise EngineError(
                f"hal: transformers: the model works on its attention mask itself ({name}), so its attention is "
                "not, or not only, what AttentionInterface names; such a model can't run on hal — leave out "
                'attn_implementation="hal"'
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Step:
    """The keys that one kind of layer sees in one forward pass.

    Args:
        requests: rows of the batch.
        queries: new tokens of each.
        keys: columns of the keys that the layer is handed.
        length: how many of these columns there are up to the last new token, a number or a one-element tensor.
        window: hal's ``sliding_window``: how many tokens before its own a query sees; -1: all.
        keep: ``[requests, keys]`` bool, False where padding is; None: there is none.
        device: of the keys.
        refused: why these layers can't run on hal, or empty.
    """

    def __init__(
        self,
        requests: int,
        queries: int,
        keys: int,
        length: int | Tensor,
        window: int,
        keep: Tensor | None,
        device: torch.device,
        refused: str = "",
    ) -> None:
        self.requests, self.queries, self.keys, self.window = requests, queries, keys, window
        self.refused = refused
        self._length, self._keep, self._device = length, keep, device
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}
        self._qo_indptr: Tensor | None = None

    def slots(self, stride: int) -> tuple[Tensor, Tensor]:
        """(kv_indptr, kv_indices), where a request's first slot is `stride` behind that of the request before."""
        if stride not in self._lists:
            self._lists[stride] = self._list(stride)
        return self._lists[stride]

    def _list(self, stride: int) -> tuple[Tensor, Tensor]:
        n, device = self.requests, self._device
        if n * stride >= 2**31:
            raise EngineError(
                f"hal: transformers: {n} requests of {stride} rows: expected fewer than 2^31 rows of keys"
            )
        rows = torch.arange(n, dtype=torch.int32, device=device)
        table = rows.view(-1, 1) * stride + torch.arange(self.keys, dtype=torch.int32, device=device)
        if self._keep is not None:
            table = torch.where(self._keep, table, -1)
        length = self._length
        if isinstance(length, Tensor):
            lengths = length.to(device=device, dtype=torch.int32).reshape(1).expand(n).contiguous()
        else:
            lengths = torch.full((n,), length, dtype=torch.int32, device=device)
        indptr = torch.empty(n + 1, dtype=torch.int32, device=device)
        indices = torch.full((n * self.keys,), -1, dtype=torch.int32, device=device)
        return indptr, hal.build_kv_indices(table, rows, lengths, indptr, indices)

    @property
    def qo_indptr(self) -> Tensor:
        """Where each request's queries begin."""
        if self._qo_indptr is None:
            last = self.requests * self.queries
            self._qo_indptr = torch.arange(0, last + 1, max(self.queries, 1), dtype=torch.int32, device=self._device)
        return self._qo_indptr


def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> StepMask:
    """The mask function of ``attn_implementation="hal"``; the arguments are those of every function that is registered
    with ``AttentionMaskInterface``.

    Returns:
        A mask that no layer but hal's can use. A pattern that the ops lack is refused by the first layer that gets it.
    """
    where = torch.device(device)
    window, refused = pattern(mask_function)
    keep = None
    if attention_mask is not None:
        keep = attention_mask[:, kv_offset : kv_offset + kv_length].to(device=where, dtype=torch.bool)
        lacking = kv_length - keep.shape[1]
        # A static cache has rows for tokens that are still to come.
        keep = torch.nn.functional.pad(keep, (0, lacking)) if lacking else keep
    length = q_offset + q_length - kv_offset
    shape = (batch_size, 1, q_length, 0)
    mask = torch.empty(shape, dtype=torch.bool, device=where).as_subclass(StepMask)
    mask.step = Step(batch_size, q_length, kv_length, length, window, keep, where, refused)
    return mask


def pattern(mask_function: Callable[..., Any] | None) -> tuple[int, str]:
    """(hal's window, why not): what a mask function of transformers means. It is told by what it is made of, never by
    its values: those would cost what the mask costs."""
    causal, window, unknown = mask_function is None, -1, ""
    for part in _parts(mask_function) if mask_function is not None else ():
        name = part.__qualname__.partition(".")[0]
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            # transformers' window counts the token itself.
            window = int(_captured(part)["sliding_window"]) - 1
        else:
            unknown = unknown or name
    if unknown:
        return window, f"its mask is not causal or a sliding window alone ({unknown})"
    return window, "" if causal else "its attention is not causal"


def _parts(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if fn.__qualname__.startswith("and_masks."):
        for part in _captured(fn)["mask_functions"]:
            yield from _parts(part)
    else:
        yield fn


def _captured(fn: Any) -> dict[str, Any]:
    return {n: c.cell_contents for n, c in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)}
