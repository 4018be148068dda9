"""What must come of arguments: made once for many proofs; and what the truths themselves tell of an op."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hal.conformance._block import bits
from hal.kv.pool import KVPool
from hal.ops.proofs.judge import Candidate, Want, same_bits
from hal.ops.spec import OpSpec


def names_nothing(wants: Mapping[str, Want]) -> bool:
    """Does the contract ask for no element at all?"""
    for name, want in wants.items():
        if want.free:
            continue
        if name == "return" and want.named.numel():
            return False
        if any(bool(w.named.any()) for w in ([want, *want.fields.values()] if name != "return" else [])):
            return False
    return True


_OUTPUTS: dict[str, frozenset[str]] = {}


def pure_outputs(spec: OpSpec) -> frozenset[str]:
    """The mutated arguments on whose contents the truth does not depend: found by changing them."""
    if spec.name not in _OUTPUTS:
        found = set()
        sample = next(s for s in spec.samples if s.tag == "required" and not s.large and s.control is None)
        for name in spec.mutated:
            a, b = spec.make(**sample.params), spec.make(**sample.params)
            if a[name] is None:
                continue
            halves = (b[name].k, b[name].v) if isinstance(b[name], KVPool) else (b[name],)
            for t in halves:
                for one in t if isinstance(t, tuple) else () if t is None else (t,):
                    bits(one).fill_(0x2A)
            if _same(spec.oracle(a), spec.oracle(b)):
                found.add(name)
        _OUTPUTS[spec.name] = frozenset(found)
    return _OUTPUTS[spec.name]


def _same(a: Mapping[str, Want], b: Mapping[str, Want]) -> bool:
    for name, want in a.items():
        pairs = [(want, b[name]), *((w, b[name].fields[x]) for x, w in want.fields.items())]
        for one, other in pairs:
            for c, d in zip(one.candidates, other.candidates, strict=True):
                for x, y in ((c.value, d.value), (c.slack, d.slack)):
                    if x is not None and y is not None and not bool(same_bits(x, y)[one.named].all()):
                        return False
    return True


class Truths:
    """Arguments and what must come of them, by op and parameters: made once, as long as there is room."""

    def __init__(self, room: int = 1 << 28) -> None:
        self.room = room
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._size = 0

    def get(self, spec: OpSpec, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Want]]:
        # Not by value: 1, 1.0 and True are equal.
        key = spec, tuple(sorted((name, repr(value)) for name, value in params.items()))
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found[0]  # type: ignore[no-any-return]
        both = self._make(spec, params)
        size = sum(t.untyped_storage().nbytes() for t in _tensors(both))
        if size < self.room // 8:
            self._kept[key] = both, size
            self._size += size
            while self._size > self.room:
                self._size -= self._kept.popitem(last=False)[1][1]
        return both

    @staticmethod
    def _make(spec: OpSpec, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Want]]:
        arguments = spec.make(**params)
        return arguments, spec.oracle(arguments)


TRUTHS = Truths()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, KVPool):
        return _tensors((value.k, value.v))
    if isinstance(value, Want):
        return [value.named, *_tensors(value.candidates), *_tensors(value.fields)]
    if isinstance(value, Candidate):
        return _tensors((value.value, value.slack))
    if isinstance(value, Mapping):
        return _tensors(tuple(value.values()))
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple) else []
