"""The suite's case list: a pure function of the OpSpecs, the same for every backend.

A run is judged against this list, so what a backend, a crash or a configuration keeps from running
shows as `not run`, never as a shorter suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from hal.conformance._result import Case
from hal.conformance.proofs.fresh import names as fresh_names
from hal.ops.spec import INDEX, OpSpec, PoolArg, Sample, TensorArg

T = TypeVar("T")

PLACEMENTS = tuple(
    """
    device-to-host host-to-device host-to-host device-to-host-cpu-slots host-to-device-cpu-slots
    device-to-device-cpu-slots
    """.split()
)
DEVICE_PROOFS = {
    "stream": "on a stream that is not the default one, behind slow work, the result is right and ordered",
    "sync": "behind a spinning kernel the call returns while the stream is busy",
    "graph": "captured once, replayed with new values",
    "overlap": "slow producer of all inputs -> op -> consumer, unsynced (programmatic launch)",
    "memory": "the device's memory holds nothing after the call but its result",
}
PROOFS = {
    "value": "every element is right, the rest is bytewise untouched; bound and dispatched; two poisons",
    "large": "the same, with offsets beyond 2^31 elements, or over very many keys",
    "misaligned": "the same, with every tensor starting off a 16-byte boundary",
    "supports": "yes runs, no raises with nothing written, and would not have run",
    "errors": "a bad argument raises, names itself, writes nothing; a good call after it is right",
    "extremes": "all pairs of extreme values in lengths, offsets, indptrs and slots (a stand-in's lane: some)",
    "pages": "no access past either end of any tensor, next to pages that may not be touched",
    "sequence": "calls in a row with other sizes and values, none of them remembered",
    "threads": "eight threads at once, each with arguments of its own",
    "determinism": "declared deterministic: the same bits every time",
    "soak": "ten thousand equal calls, every one of them compared with the first",
    "leak": "nothing is kept from call to call: tensors, objects, memory, files, threads",
    "later": "a second after the calls, their results, inputs and guard zones are as they were",
    "ragged": "shapes drawn by Hypothesis",
    "fresh": "inputs drawn anew in every run, sizes far beyond the samples",
    "defaults": "under a foreign default device, set or entered, and a default dtype of bf16",
    "empty": "each size of each tensor is 0 in turn",
    "placement": "pools on the device and on the host, slots on either",
    **DEVICE_PROOFS,
}
"""Proof -> what it shows, in the order of the tables."""
DEFAULTS = ("set-device", "with-device", "dtype")
"""Cases of ``defaults``."""
ALONE = frozenset({"large", "threads", "leak", *DEVICE_PROOFS})
"""Proofs that other processes on the machine could disturb: they measure time, memory or threads."""


def spread(samples: list[T], count: int) -> list[T]:
    """`count` of them, evenly over the list, the first among them."""
    if len(samples) <= count:
        return samples
    step = len(samples) / count
    return [samples[int(i * step)] for i in range(count)]


def cases_of(spec: OpSpec) -> list[Case]:
    """All cases of one op."""
    op = spec.name
    small = [s for s in spec.samples if not s.large]
    required = [s for s in small if s.tag == "required"]
    busy = [s for s in required if s.control is None]

    def of(proof: str, samples: Iterable[Sample], may_die: bool = False) -> list[Case]:
        return [Case(op, proof, s.name, s.name, s.tag, may_die) for s in samples]

    out = of("value", small)
    out += of("large", [s for s in spec.samples if s.large], may_die=True)
    out += of("misaligned", spread(busy, 8))
    out += of("supports", [s for s in small if s.tag != "required"], may_die=True)
    out += [Case(op, "errors", e.name) for e in spec.errors]
    out += of("pages", busy, may_die=True)
    if index_arguments(spec):
        out.append(Case(op, "extremes", "all", may_die=True))
    out += of("determinism", _distinct([*spread(busy, 6), *(s for s in busy if "equal" in s.params.values())]))
    out += [Case(op, proof, "all") for proof in ("sequence", "threads", "soak", "leak", "later", "ragged")]
    out += [Case(op, "fresh", name) for name in fresh_names(spec)]
    out += [Case(op, "defaults", name) for name in DEFAULTS]
    out += [Case(op, "empty", dim) for dim in dims_of(spec)]
    if sum(isinstance(a, PoolArg) for a in spec.args.values()) > 1:
        out += [Case(op, "placement", p) for p in PLACEMENTS]
    out += [Case(op, proof, "all", may_die=True) for proof in DEVICE_PROOFS]
    return out


def index_arguments(spec: OpSpec) -> list[str]:
    """The index tensors that the op reads."""
    return [
        n
        for n, a in spec.args.items()
        if isinstance(a, TensorArg) and not a.mutated and not isinstance(a.dtypes, str) and set(a.dtypes) == set(INDEX)
    ]


def dims_of(spec: OpSpec) -> list[str]:
    """The sizes that an op's tensors have, by name, in the order of the arguments; cases of ``empty``."""
    tensors = [a for a in spec.args.values() if isinstance(a, TensorArg)]
    found = [d for a in tensors for alternative in a.alternatives for d in alternative]
    return [d for d in dict.fromkeys(found) if d.isidentifier()]


def _distinct(samples: list[Sample]) -> list[Sample]:
    return list({s.name: s for s in samples}.values())


def case_list(specs: Mapping[str, OpSpec]) -> list[Case]:
    """The cases of several ops, in order."""
    return [case for spec in specs.values() for case in cases_of(spec)]
