"""In a compiled graph: the rotation of q and k and the write of the cache as one call: `rope_kv_write`, or MLA's.

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
from hal.engines.vllm import memory
from hal.engines.vllm.memory import VIEWS, alone, called, same, source
from hal.engines.vllm.rotary import LIBRARY

logger = init_logger("vllm.hal")

WRITES = "vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"


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
    if compilation.splitting_ops and torch_utils._USE_LAYERNAME:
        compilation.splitting_ops = [op for op in compilation.splitting_ops if op not in WRITES]


class Fusion(InductorPass):
    """The pass. `before`: one that the user gave, which runs first."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def uuid(self) -> Any:
        before = self.before.uuid() if hasattr(self.before, "uuid") else repr(self.before)
        sources = (inspect.getsource(module) for module in (sys.modules[__name__], memory))
        return self.hash_source(*sources, __version__, str(before))

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        # What nobody reads any more is no reader of q and k either.
        graph.eliminate_dead_code()
        ops = torch.ops
        fused = rotated = 0
        for write in graph.find_nodes(op="call_function", target=ops.vllm.unified_kv_cache_update.default):
            fused += _fuse(graph, write)
        for write in graph.find_nodes(op="call_function", target=ops.vllm.unified_mla_kv_cache_update.default):
            fused += _fuse_latent(graph, write)
        for rope in graph.find_nodes(op="call_function", target=ops.hal_vllm.rope.default):
            rotated += _in_place(graph, rope)
        graph.eliminate_dead_code()
        graph.lint()
        logger.debug("hal: %d rotations fused with the write of the cache, %d in place", fused, rotated)


def _results(rope: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The rotated q's and k's nodes; None if something else is done with the pair."""
    found: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    for user in rope.users:
        if not called(user, operator.getitem):
            return None
        found[user.args[1]].append(user)  # type: ignore[index]
    return found


def _rotation(key: Any) -> Any:
    """The rotation that made a key, which is a view of it; None: something else did."""
    rotated = source(key)
    if not (called(rotated, operator.getitem) and rotated.args[1] == 1):
        return None
    rope = rotated.args[0]
    return rope if called(rope, torch.ops.hal_vllm.rope.default) else None


def _moved(graph: fx.Graph, rope: fx.Node, write: fx.Node, *more: Any) -> list[fx.Node] | None:
    """What comes of the rotated q and k until the write, last first, if that is views of them, or calls of `more`:
    these may move behind the write. None: it is not."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[fx.Node] = []
    reached = list(rope.users)
    while reached:
        node = reached.pop()
        if node in found or node is write or order[node] > order[write]:
            continue
        if not called(node, operator.getitem, *VIEWS, *more):
            return None
        found.append(node)
        reached += node.users
    return sorted(found, key=order.__getitem__, reverse=True)


def _put(write: fx.Node, fused: fx.Node, moved: list[fx.Node], same: list[tuple[fx.Node, fx.Node]]) -> bool:
    """`fused` in the place of `write`, views behind it, and of each pair the second in the place of the first."""
    fused.meta["val"] = write.meta["val"]
    for node in moved:
        if called(node, *VIEWS):
            fused.append(node)
    for node, by in [*same, (write, fused)]:
        node.replace_all_uses_with(by)
    write.graph.erase_node(write)
    return True


def _fuse(graph: fx.Graph, write: fx.Node) -> bool:
    rope = _rotation(write.args[0])
    if rope is None:
        return False
    positions, query, key, table, head_size, is_neox = rope.args
    results = _results(rope)
    if results is None or not (alone(query, {(rope, query)}) and alone(key, {(rope, key)})):
        return False
    moved = _moved(graph, rope, write)
    if moved is None:
        return False
    with graph.inserting_before(write):
        n = (
            graph.call_function(torch.ops.aten.sym_size.int, (query, 0))
            if _dynamic(query)
            else query.meta["val"].shape[0]
        )
        view = torch.ops.aten.reshape.default
        q, k = (graph.call_function(view, (x, [n, -1, head_size])) for x in (query, key))
        for made, given in ((q, query), (k, key)):
            made.meta["val"] = given.meta["val"].reshape(given.meta["val"].shape[0], -1, head_size)
        if isinstance(n, fx.Node):
            n.meta["val"] = query.meta["val"].shape[0]
        fused = graph.call_function(
            torch.ops.hal_vllm.rope_kv_write.default, (q, k, write.args[1], positions, table, is_neox, write.args[2])
        )
    return _put(write, fused, moved, [(x, by) for mine, by in zip(results, (query, key), strict=True) for x in mine])


def _fuse_latent(graph: fx.Graph, write: fx.Node) -> bool:
    """Of MLA: of the heads of q a last part is rotated, which is then put back in its place."""
    latents, rotated, name, _, scale = write.args
    rope = _rotation(rotated)
    results = rope and _results(rope)
    if not results or len(results[0]) != 1:
        return False
    positions, part, key, table, _, is_neox = rope.args
    back = _put_back(results[0][0], part)
    if back is None:
        return False
    query: Any = back.args[0]
    if not (alone(part, {(rope, part), (back, query)}) and alone(key, {(rope, key)})):
        return False
    moved = _moved(graph, rope, write, torch.ops.aten.copy.default, torch.ops.aten.slice_scatter.default)
    if moved is None:
        return False
    with graph.inserting_before(write):
        fused = graph.call_function(
            torch.ops.hal_vllm.mla_rope_kv_write.default, (query, key, latents, scale, positions, table, is_neox, name)
        )
    return _put(write, fused, moved, [(back, query), *((k, key) for k in results[1])])


def _put_back(rotated: fx.Node, part: Any) -> fx.Node | None:
    """The only call that reads the rotated part of q: what writes it to where it was read, a slice of each head."""
    users = list(rotated.users)
    if len(users) == 1 and called(users[0], torch.ops.aten.copy.default) and users[0].args[1] is rotated:
        users = list(users[0].users)
    back: Any = users[0] if len(users) == 1 else None
    if not (called(back, torch.ops.aten.slice_scatter.default) and called(part, torch.ops.aten.slice.Tensor)):
        return None
    whole, place = part.args[0], part.args[1:]
    if not back.args[1:] or back.args[2:] != place or place[0] != part.meta["val"].ndim - 1 != 1:
        return None
    return back if same(whole, back.args[0]) else None


def _dynamic(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"].shape[0], int)


def _in_place(graph: fx.Graph, rope: fx.Node) -> bool:
    """A rotation that stays alone, without a copy of q and k where nobody else reads them."""
    query, key = rope.args[1:3]
    results = _results(rope)
    if results is None or not (alone(query, {(rope, query)}) and alone(key, {(rope, key)})):  # type: ignore[arg-type]
        return False
    with graph.inserting_before(rope):
        graph.call_function(torch.ops.hal_vllm.rope_.default, rope.args)
    for mine, given in zip(results, (query, key), strict=True):
        for node in mine:
            node.replace_all_uses_with(given)  # type: ignore[arg-type]
    return True


# --- the fused ops ----------------------------------------------------------------------------------


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


def mla_rope_kv_write(
    query: Tensor,
    key: Tensor,
    latents: Tensor,
    scale: Tensor,
    positions: Tensor,
    table: Tensor,
    is_neox: bool,
    layer_name: LayerNameType,
) -> Tensor:
    """Likewise of MLA; of each head of query a last part is rotated, as wide as key."""
    _, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    if slots is not None:
        layer.impl.do_rope_and_kv_cache_update(query, key, latents, positions, table, is_neox, kv_cache, slots, scale)
    return key.new_empty(0)


direct_register_custom_op(
    "mla_rope_kv_write", mla_rope_kv_write, ["query", "key"], lambda query, key, *others: key.new_empty(0), LIBRARY
)
