"""The suite's case list: a pure function of the OpSpecs, the same for every backend.

A run is judged against this list, so what a backend, a crash or a configuration keeps from running
shows as `not run`, never as a shorter suite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from importlib import resources

from hal.conformance._result import Case
from hal.ops._spec import OpSpec, PoolArg, Sample

PLACEMENTS = ("device-to-host", "host-to-device", "host-to-host", "device-to-host-cpu-slots",
              "host-to-device-cpu-slots", "device-to-device-cpu-slots")  # fmt: skip
DEVICE_PROOFS = {
    "stream": "on a stream that is not the default one, behind slow work, the result is right and ordered",
    "sync": "behind a spinning kernel the call returns while the stream is busy",
    "graph": "captured once, replayed with new values",
    "overlap": "slow producer of all inputs -> op -> consumer, unsynced (programmatic launch)",
    "memory": "the device's memory holds nothing after the call but its result",
}
PROOFS = {
    "value": "every element is right, the rest is bytewise untouched; bound and dispatched; two poisons",
    "large": "the same, with offsets beyond 2^31 elements",
    "misaligned": "the same, with every tensor starting off a 16-byte boundary",
    "supports": "yes runs, no raises with nothing written, and would not have run",
    "errors": "a bad argument raises, names itself, writes nothing; a good call after it is right",
    "pages": "no access past either end of any tensor, next to pages that may not be touched",
    "sequence": "calls in a row with other sizes and values, none of them remembered",
    "threads": "eight threads at once, each with arguments of its own",
    "determinism": "declared deterministic: the same bits every time",
    "leak": "nothing is kept from call to call",
    "ragged": "shapes drawn by Hypothesis",
    "placement": "pools on the device and on the host, slots on either",
    **DEVICE_PROOFS,
}
"""Proof -> what it shows, in the order of the tables."""
ALONE = frozenset({"large", "threads", "leak", *DEVICE_PROOFS})
"""Proofs that other processes on the machine could disturb: they measure time, memory or threads."""


def spread(samples: list[Sample], count: int) -> list[Sample]:
    """`count` samples, evenly over the list, the first among them."""
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
    out += of(
        "determinism", _distinct([*spread(busy, 6), *(s for s in busy if "equal" in s.params.values())])
    )
    out += [Case(op, proof, "all") for proof in ("sequence", "threads", "leak", "ragged")]
    if sum(isinstance(a, PoolArg) for a in spec.args.values()) > 1:
        out += [Case(op, "placement", p) for p in PLACEMENTS]
    out += [Case(op, proof, "all", may_die=True) for proof in DEVICE_PROOFS]
    return out


def _distinct(samples: list[Sample]) -> list[Sample]:
    return list({s.name: s for s in samples}.values())


def case_list(specs: Mapping[str, OpSpec]) -> list[Case]:
    """The cases of several ops, in order."""
    return [case for spec in specs.values() for case in cases_of(spec)]


def suite_hash() -> str:
    """SHA-256 over the sources that decide a verdict: this package, the op contracts, the pools."""
    digest = hashlib.sha256()
    for package in ("hal.conformance", "hal.ops", "hal"):
        for item in sorted(resources.files(package).iterdir(), key=lambda i: i.name):
            if item.name.endswith(".py") and (package != "hal" or item.name in ("kvpool.py", "_errors.py")):
                digest.update(f"{package}/{item.name}\0".encode() + item.read_bytes() + b"\0")
    return digest.hexdigest()
