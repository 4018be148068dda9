"""Of a compiled graph: which memory a node is a view of, and who else reads it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
)
_SPLITS = torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor


def called(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def source(node: Any) -> Any:
    """What `node` is a view of, by views of all of it or of a slice."""
    while called(node, *VIEWS):
        node = node.args[0]
    return node


def alone(node: fx.Node, readers: Collection[tuple[fx.Node, fx.Node]]) -> bool:
    """Is this memory read by `readers` alone, (who, by which view), so that it may be written in place?

    What others read of the same result must be other columns, as the parts of a split are.
    """
    root = _root(node)
    mine = _columns(node, root)
    return _new(root) and all(
        (user, view) in readers or _apart(mine, _columns(view, root)) for user, view in _readers(root)
    )


def same(a: fx.Node, b: fx.Node) -> bool:
    """Are both the same view of the same memory?"""
    x, y = a.meta.get("val"), b.meta.get("val")
    if x is None or y is None or _root(a) is not _root(b):
        return False
    layout = [_known(*v.stride(), v.storage_offset(), *v.shape[1:]) for v in (x, y)]
    return layout[0] is not None and layout[0] == layout[1]


def _is_view(node: Any) -> bool:
    return called(node, *VIEWS, *_SPLITS) or (called(node, operator.getitem) and called(node.args[0], *_SPLITS))


def _root(node: Any) -> Any:
    while _is_view(node):
        node = node.args[0]
    return node


def _readers(root: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(who, by which view): all that read values."""
    views = [root]
    while views:
        view = views.pop()
        for user in view.users:
            if _is_view(user):
                views.append(user)
            # A functional copy reads what it is given second; of the first, its shape.
            elif not called(user, torch.ops.aten.sym_size.int) and not (
                called(user, torch.ops.aten.copy.default) and user.args[1] is not view
            ):
                yield user, view


def _columns(view: fx.Node, root: fx.Node) -> range | None:
    """Of a row of `root`, those that lie between a view's first and last. None: not known."""
    whole, part = root.meta.get("val"), view.meta.get("val")
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor) or not whole.ndim:
        return None
    known = _known(whole.stride(0), part.storage_offset() - whole.storage_offset(), *part.stride())
    if known is None or not known[0]:
        return None
    width, offset, *strides = known
    low = high = offset % width
    for size, stride in zip(part.shape, strides, strict=True):
        if stride % width:
            if not is_concrete_int(size):
                return None
            high += (int(size) - 1) * stride
    return range(low, high + 1) if low <= high < width else None


def _known(*numbers: Any) -> list[int] | None:
    """None: one of them depends on a size that is free."""
    return [int(n) for n in numbers] if all(map(is_concrete_int, numbers)) else None


def _apart(a: range | None, b: range | None) -> bool:
    return a is not None and b is not None and (a.stop <= b.start or b.stop <= a.start)


def _new(node: Any) -> bool:
    """Is it a result that shares its memory with nothing?"""
    if called(node, operator.getitem):
        several = node.args[0]
        if sum(u.args[1:] == node.args[1:] for u in several.users) != 1:
            return False
        node = several
    if called(node, torch.ops.higher_order.auto_functionalized):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(r.alias_info is None for r in node.target._schema.returns)
