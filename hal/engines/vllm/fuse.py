"""In a compiled graph: the rotation of q and k and the write of k and v to the cache as one call of `rope_kv_write`.

A pass over vLLM's graph, given to inductor by vLLM's own setting (``inductor_compile_config``). It fuses where the
graph proves that it may: the rotated k goes to the write by views alone, and nobody else sees q and k unrotated.
"""

from __future__ import annotations

import inspect
import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from hal._version import __version__
from hal.engines import asked
from hal.engines.vllm.rotary import LIBRARY

logger = init_logger("vllm.hal")

WRITE = "vllm::unified_kv_cache_update"


def enable(config: Any) -> None:
    """Adds the pass to a configuration, once, before its model is compiled. Called by every layer that is made."""
    if not asked("vllm"):
        return
    compilation = config.compilation_config
    settings = compilation.inductor_compile_config
    given = settings.get(current_platform.pass_key)
    if not isinstance(given, Fusion):
        settings[current_platform.pass_key] = Fusion(given)
    # vLLM splits its graph at the write, for a layer's name would make every piece another: not where the name is an
    # input of the piece. Then rotation and write lie in one piece.
    if compilation.splitting_ops and torch_utils._USE_LAYERNAME and WRITE in compilation.splitting_ops:
        compilation.splitting_ops.remove(WRITE)


class Fusion(InductorPass):
    """The pass. `before`: one that the user gave, which runs first."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def uuid(self) -> Any:
        before = self.before.uuid() if hasattr(self.before, "uuid") else repr(self.before)
        return self.hash_source(inspect.getsource(sys.modules[__name__]), __version__, str(before))

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        # What nobody reads any more is no reader of q and k either.
        graph.eliminate_dead_code()
        ops = torch.ops
        fused = rotated = 0
        for write in graph.find_nodes(op="call_function", target=ops.vllm.unified_kv_cache_update.default):
            fused += _fuse(graph, write)
        for rope in graph.find_nodes(op="call_function", target=ops.hal_vllm.rope.default):
            rotated += _in_place(graph, rope)
        graph.eliminate_dead_code()
        graph.lint()
        logger.debug("hal: %d rotations fused with the write of the cache, %d in place", fused, rotated)


_VIEWS = (
    torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default,
    torch.ops.aten.slice.Tensor, torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
)  # fmt: skip
_SPLITS = (
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes_copy.default,
)


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _source(node: Any) -> Any:
    """What `node` is a view of."""
    while _is(node, *_VIEWS):
        node = node.args[0]
    return node


def _alone(node: fx.Node, reader: fx.Node) -> bool:
    """Is `reader` the only one that reads this memory, so that it may be written in place?

    Such are a result that nobody else reads, and a part of a split of one, whose other parts lie elsewhere.
    """
    if list(node.users) != [reader]:
        return False
    while True:
        if _is(node, *_VIEWS):
            node = node.args[0]  # type: ignore[assignment]
            if len(node.users) != 1:
                return False
        elif _is(node, operator.getitem) and _is(node.args[0], *_SPLITS):
            split: Any = node.args[0]
            base: Any = split.args[0]
            # A graph may split the same thing the same way for each of its parts.
            if not all(_is(u, *_SPLITS) and u.args[1:] == split.args[1:] for u in base.users):
                return False
            parts = [u for s in base.users for u in s.users]
            if not all(_is(u, operator.getitem) for u in parts):
                return False
            if sum(u.args[1] == node.args[1] for u in parts) != 1:
                return False
            return _new(base)
        else:
            return _new(node)


def _new(node: fx.Node) -> bool:
    """Is it a result that shares its memory with nothing?"""
    if _is(node, operator.getitem):
        pair: Any = node.args[0]
        if sum(u.args[1:] == node.args[1:] for u in pair.users) != 1:
            return False
        node = pair
    if _is(node, torch.ops.higher_order.auto_functionalized):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(r.alias_info is None for r in node.target._schema.returns)


def _results(rope: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The rotated q's and k's nodes; None if something else is done with the pair."""
    found: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    for user in rope.users:
        if not _is(user, operator.getitem):
            return None
        found[user.args[1]].append(user)  # type: ignore[index]
    return found


def _fuse(graph: fx.Graph, write: fx.Node) -> bool:
    rotated = _source(write.args[0])
    if not (_is(rotated, operator.getitem) and rotated.args[1] == 1):
        return False
    rope = rotated.args[0]
    if not _is(rope, torch.ops.hal_vllm.rope.default):
        return False
    positions, query, key, table, head_size, is_neox = rope.args
    results = _results(rope)
    if results is None or not (_alone(query, rope) and _alone(key, rope)):
        return False
    # Until the write, whatever comes of the rotated q and k may only be views of them: they move behind it.
    order = {node: i for i, node in enumerate(graph.nodes)}
    moved: list[fx.Node] = []
    reached = list(rope.users)
    while reached:
        node = reached.pop()
        if node in moved or node is write or order[node] > order[write]:
            continue
        if not _is(node, operator.getitem, *_VIEWS):
            return False
        moved.append(node)
        reached += node.users
    with graph.inserting_before(write):
        n = (
            graph.call_function(torch.ops.aten.sym_size.int, (query, 0))
            if _dynamic(query)
            else query.meta["val"].shape[0]
        )
        view = torch.ops.aten.reshape.default
        q, k = (graph.call_function(view, (x, [n, -1, head_size])) for x in (query, key))
        for made, source in ((q, query), (k, key)):
            made.meta["val"] = source.meta["val"].reshape(source.meta["val"].shape[0], -1, head_size)
        if isinstance(n, fx.Node):
            n.meta["val"] = query.meta["val"].shape[0]
        fused = graph.call_function(
            torch.ops.hal_vllm.rope_kv_write.default, (q, k, write.args[1], positions, table, is_neox, write.args[2])
        )
        fused.meta["val"] = write.meta["val"]
    for node in sorted(moved, key=order.__getitem__, reverse=True):
        if not _is(node, operator.getitem):
            fused.append(node)
    for mine, source in zip(results, (query, key), strict=True):
        for node in mine:
            node.replace_all_uses_with(source)
    write.replace_all_uses_with(fused)
    graph.erase_node(write)
    return True


def _dynamic(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"].shape[0], int)


def _in_place(graph: fx.Graph, rope: fx.Node) -> bool:
    """A rotation that stays alone, without a copy of q and k where nobody else reads them."""
    query, key = rope.args[1:3]
    results = _results(rope)
    if results is None or not (_alone(query, rope) and _alone(key, rope)):  # type: ignore[arg-type]
        return False
    with graph.inserting_before(rope):
        graph.call_function(torch.ops.hal_vllm.rope_.default, rope.args)
    for mine, source in zip(results, (query, key), strict=True):
        for node in mine:
            node.replace_all_uses_with(source)  # type: ignore[arg-type]
    return True


# --- the fused op -----------------------------------------------------------------------------------


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    table: Tensor,
    is_neox: bool,
    layer_name: LayerNameType,
) -> Tensor:
    """vLLM's ``fused_rope_and_unified_kv_cache_update``, which it defines for ROCm alone; returns what it returns."""
    _, layer, kv_cache, slot_mapping = get_attention_context(_resolve_layer_name(layer_name))
    if slot_mapping is not None:
        layer.impl.do_rope_and_kv_cache_update(
            layer, query, key, value, positions, table, is_neox, kv_cache, slot_mapping
        )
    return key.new_empty(0)


direct_register_custom_op(
    "rope_kv_write", rope_kv_write, ["query", "key"], lambda query, key, *others: key.new_empty(0), LIBRARY
)
