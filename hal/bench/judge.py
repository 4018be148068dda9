# mypy: disable-error-code="no-untyped-call"
# torch.cuda has untyped functions.
"""Outputs against the contract's own truth: nothing is timed that is wrong.

`check` and `prove` are the conformance suite's `execute`, of any call here and of our launcher where it runs.
`check_transfer` is not: calls between pools of gigabytes are bound to the memory that they are timed on, and `execute`
judges in memory of its own. Of attention whose sizes are an engine's, `truth_of` is computed where the tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._remote.target import DirectTarget, RegistryTarget
from hal.conformance._result import NOT_APPLICABLE, PASSED, Case
from hal.conformance.execute import Executor, Failure
from hal.conformance.proofs.run import run_case
from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops.proofs import judge as bound
from hal.ops.spec import FP8, OpSpec, Sample


class Peer(DirectTarget):
    """Whoever is timed: our launcher, torch's way, or the reference."""

    def foreign(self, op: str) -> dict[CodeType, str]:
        return {}


def check(op: str, name: str, call: Callable[[dict[str, Any]], Any], make: Callable[[], dict[str, Any]]) -> None:
    """Raises unless `call` does what the contract says, to the last bit it allows; what else it returns is its own."""
    args, spec = make(), get_spec(op)
    wants = spec.oracle(args)

    def run(**given: Any) -> Any:
        result = call(given)
        return result if "return" in wants else None

    try:
        Executor(Peer.of(op, run), spec).execute(args, wants)
    except Failure as e:
        raise AssertionError(f"{op}: {name}: {e}") from None


def check_transfer(name: str, call: Callable[[], Any], src: KVPool, dst: KVPool, there: Tensor, here: Tensor) -> None:
    """Raises unless `call` copies the rows `there` of one pool to `here` of the other, which it finds overwritten.

    Looked at are the first layer and the last."""

    def at(pool: KVPool, slots: Tensor) -> Any:
        paged = pool.layout in ("page_first_direct", "page_head")
        return (slots // pool.page_size, slots % pool.page_size) if paged else slots

    def read(pool: KVPool, half: Tensor, slots: Tensor) -> Tensor:
        return half[at(pool, slots)].view(torch.int16).cpu()

    layers = 0, src.num_layers - 1
    for layer in layers:
        for half in dst.layer(layer):
            if half is not None:
                half[at(dst, here)] = -1
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for layer in layers:
        for s, d in zip(src.layer(layer), dst.layer(layer), strict=True):
            if s is not None and d is not None and not torch.equal(read(src, s, there), read(dst, d, here)):
                raise AssertionError(f"kv_transfer: {name}: {src.layout} to {dst.layout}: wrong rows in layer {layer}")


def prove(op: str, params: Mapping[str, Any], backend: str) -> float:
    """Calls our launcher with what `params` make, and from a captured graph where the device has them.

    Returns:
        The largest error, in units of the bound.

    Raises:
        AssertionError: it did not do what the contract says.
    """
    return _prove(replace(get_spec(op), samples=(Sample("form", params),)), backend)


def verdict(op: str, args: Mapping[str, Any]) -> float:
    """As `prove`, of cuda's launcher with `args`, whose truth does not depend on what its outputs held."""
    spec = get_spec(op)
    wants = spec.oracle(args)
    same = replace(spec, samples=(Sample("form"),), make=lambda **_: dict(args), oracle=lambda _: wants)
    return _prove(same, "cuda")


def _prove(spec: OpSpec, backend: str) -> float:
    worst = 0.0
    for proof in ("value", "graph"):
        result = run_case(Case(spec.name, proof, "form", "form"), RegistryTarget.of(backend, "device"), spec)
        if result.outcome not in (PASSED, NOT_APPLICABLE):
            params = dict(spec.samples[0].params)
            raise AssertionError(f"{spec.name}: {proof} of {params}: {result.outcome}: {result.reason}")
        worst = max([worst, *result.headroom.values()])
    return worst


def truth_of(
    q: Tensor, k: Tensor, v: Tensor, scale: float, position: Tensor, window: int = -1, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(attention in float64, the contract's slack) of queries over the keys up to a position each.

    Args:
        q: ``[n, q_heads, head_dim]``.
        k: ``[keys, kv_heads, head_dim]``.
        v: ``[keys, kv_heads, v_head_dim]``.
        scale: what logits are multiplied by.
        position: ``[n]``, the last key that a query sees.
        window: how many it sees before that; -1: all.
        cap: a logit x is ``cap * tanh(x / cap)``; 0: itself.
    """
    n, q_heads, dim = q.shape
    x, k, v = q.double().view(n, k.shape[1], -1, dim), k.double(), v.double()
    logits = torch.einsum("nhgd,jhd->nhgj", x, k) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    j, last = torch.arange(len(k), device=k.device, dtype=torch.int64), position.view(-1, 1, 1, 1)
    seen = (j <= last) & (j >= last - window) if window >= 0 else j <= last
    size = torch.einsum("nhgd,jhd->nhgj", x.abs(), k.abs()).masked_fill(~seen, 0.0).amax(-1) * scale
    p = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
    many = seen.sum(-1).view(-1, 1).expand(n, q_heads)
    weight, truth = (torch.einsum("nhgj,jhd->nhgd", p, y).reshape(n, q_heads, -1) for y in (v.abs(), v))
    slack, _ = bound.attention_slack(q.dtype, dim, size.reshape(n, q_heads), many, weight)
    return truth, slack


def headroom(request: int, out: Tensor, truth: Tensor, slack: Tensor) -> float:
    """The largest error of a request's rows, in units of the bound.

    Raises:
        AssertionError: it is outside of the bound.
    """
    want = bound.Want(_host.ones(truth.shape, dtype=torch.bool), (bound.Candidate(truth.cpu(), slack.cpu()),))
    got = out.cpu()
    if not bound.right_any(got, want).all():
        raise AssertionError(f"request {request}: outside the bound")
    return bound.headroom(got, want)


def rows_at(cache: Tensor, slots: Tensor) -> Tensor:
    """A cache's rows, also of fp8, which torch can't index."""
    rows = cache.view(-1, *cache.shape[2:])
    return rows.view(torch.uint8)[slots.long()].view(cache.dtype) if cache.dtype in FP8 else rows[slots.long()]
