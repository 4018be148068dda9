"""Golden inputs and outputs: what a backend gave on one machine, replayed on another that has none of it.

Recorded from the CUDA backend on an H200, they let an Ascend machine show that its kernels do what the
other ones did, on the very same bits of input, without a CUDA device beside it::

    python -m hal.golden record tests/golden --backend cuda --device cuda
    python -m hal.golden replay tests/golden --backend ascend --device npu

A file an op, ``<op>.pt``: tensors and plain values alone, read with ``weights_only``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal._errors import HalError, NoBackendError, SelectionError
from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops.proofs.judge import Want, right_any, same_bits

FORMAT = 1

CHOSEN: dict[str, tuple[str, ...]] = {
    "get_last_loc": ("i32-i32", "i64-i64", "strided-table", "edge", "extreme"),
    "assign_extend_cache_locs": (
        "i32-i32-i32", "i64-i64-i64", "too-little-room", "negative-lengths", "edge", "extreme",
    ),
    "rope_kv_write": (
        "fp16", "bf16", "fp32", "llama3-70b-tp8-bf16", "smollm2-bf16", "paged-16", "slots-pairs",
        "fused-qkv-bf16", "partial-rotary", "rope-alone-bf16", "keep-k-bf16", "edge", "extreme", "interleaved-bf16",
    ),
    "kv_transfer": (
        "layer_first-to-page_first", "page_first-to-page_first_direct", "page_first_direct-to-layer_first",
        "mla-layer_first-to-page_first", "page-3-to-page-16", "edge", "extreme", "layer-1-of-3",
    ),
    "write_req_to_token": ("i32-i32-i32", "i64-i64-i64", "too-few-slots", "strided-table", "edge", "extreme"),
    "compute_positions": ("i32-i32-i32", "i64-i64-i64", "too-little-room", "much-room", "edge", "extreme"),
    "build_kv_indices": (
        "i32-i32-i32-i32-start-i32", "i64-i64-i64-i64-start-i64", "i64-i64-i32-i32-start-None", "edge", "extreme",
    ),
    "build_page_table": ("i32-i32-i32", "i64-i64-i64", "page-7", "holes", "strided-out", "edge", "extreme"),
    "alloc_extend": ("i32-i32-i32-i32", "i64-i64-i64-i64", "page-1", "page-7", "too-few-pages", "edge", "extreme"),
    "alloc_decode": ("i32-i32-i32-i32", "i64-i64-i64-i64", "page-1", "page-7", "too-few-pages", "edge", "extreme"),
    "kv_write": ("bf16", "paged-pairs", "extreme"),
    "mla_kv_write": ("bf16", "paged-heads-padded", "extreme"),
    "mla_rope_kv_write": ("bf16", "keep-k-bf16"),
    "qk_norm_rope_kv_write": ("bf16", "extreme"),
    "kv_move": ("cycle-page_first", "mla-list", "extreme"),
    "decode_attention": ("bf16", "skip"),
    "extend_attention": ("bf16",),
}  # fmt: skip
"""Op -> the samples that are recorded: small, and together every path of the op."""


@dataclass(frozen=True)
class Outcome:
    """One golden case, replayed.

    Attributes:
        op: its name.
        case: the sample's.
        passed: every element is one that the op's contract allows, and of what is exact (integers, moved
            bytes, all that the contract does not name) every bit is the recorded one.
        detail: what differs, or why it did not run; else empty.
        same: the share of elements whose bits are the recorded ones. Floats may differ in the last place.
        ran: False where the backend does not have the op, refuses the case or is not there: neither passed nor
            failed.
    """

    op: str
    case: str
    passed: bool
    detail: str
    same: float
    ran: bool = True


def record(folder: Path, backend: str, device: str) -> list[Path]:
    """Run the chosen samples on `backend` and write what went in and came out.

    Args:
        folder: for the files; made if it is not there.
        backend: a backend's name, strict.
        device: where the tensors are put, e.g. ``cuda``.

    Returns:
        The files written.

    Raises:
        HalError: an output is not one that the contract allows: nothing wrong is recorded.
    """
    import hal

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op in CHOSEN:
        contract = get_spec(op)
        samples = {s.name: s for s in contract.samples}
        cases = {}
        for name in CHOSEN[op]:
            args = contract.make(seed=2026, **samples[name].params)
            before = _packed(args)
            want = contract.oracle(args)
            placed = {n: _to(v, device) for n, v in args.items()}
            result = getattr(hal, op)(**placed, backend=backend)
            after = _outputs(want, placed, result)
            if wrong := _wrong(want, after):
                raise HalError(
                    f"hal: golden: {op} {name} on {backend}: {wrong}; nothing was recorded for {op}"
                )
            cases[name] = {"args": before, "outputs": after}
        path = folder / f"{op}.pt"
        torch.save({"format": FORMAT, "op": op, "made": _made(backend, device), "cases": cases}, path)
        written.append(path)
    return written


def replay(folder: Path, backend: str, device: str) -> list[Outcome]:
    """Run `backend` on recorded inputs and compare with what was recorded.

    Args:
        folder: where `record` wrote.
        backend: a backend's name, strict.
        device: where the tensors are put, e.g. ``npu``; ``cpu`` in the lowered lane.

    Raises:
        HalError: there are no files, or they are of another format.
        SelectionError: there is no such backend.
    """
    import hal

    outcomes = []
    paths = sorted(folder.glob("*.pt"))
    if not paths:
        raise HalError(f"hal: golden: no recordings in {folder}; python -m hal.golden record makes them")
    for path in paths:
        kept = torch.load(path, weights_only=True)
        if kept.get("format") != FORMAT:
            raise HalError(f"hal: golden: {path} has format {kept.get('format')}, this hal reads {FORMAT}")
        contract = get_spec(kept["op"])
        for name, case in kept["cases"].items():
            args = {n: _unpacked(v) for n, v in case["args"].items()}
            want = contract.oracle(args)
            try:
                placed = {n: _to(v, device) for n, v in args.items()}
                result = getattr(hal, contract.name)(**placed, backend=backend)
                outputs = _outputs(want, placed, result)
            except SelectionError:
                raise
            except NoBackendError as e:
                why = _declined(contract.name, placed, backend)
                outcomes.append(
                    Outcome(contract.name, name, False, why or f"{type(e).__name__}: {e}", 0.0, ran=not why)
                )
                continue
            except Exception as e:
                outcomes.append(Outcome(contract.name, name, False, f"{type(e).__name__}: {e}", 0.0))
                continue
            outcomes.append(_compare(contract.name, name, want, outputs, case["outputs"]))
    return outcomes


def _declined(op: str, args: Mapping[str, Any], backend: str) -> str:
    """What the backend says beforehand if it does not do this; "" where it only breaks."""
    import hal

    told = hal.explain(op, backend=backend, **args)
    own = [v for v in told.verdicts if v.name.partition("/")[0] == backend.partition("/")[0]]
    if any(
        v.state not in ("unimplemented", "rejected", "absent", "unavailable", "incompatible") for v in own
    ):
        return ""
    return "; ".join(f"{v.state}: {v.reason}".removesuffix(": ") for v in own)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 where all that ran passed, 1 where something failed, 3 where nothing ran."""
    ran = [o for o in outcomes if o.ran]
    return 3 if not ran else int(not all(o.passed for o in ran))


def summary(outcomes: Sequence[Outcome]) -> str:
    """The counts; what did not run is never among those that passed."""
    ran = sum(o.ran for o in outcomes)
    text = f"{sum(o.passed for o in outcomes)} passed / {ran} replayed"
    return (
        text if ran == len(outcomes) else f"{text} / {len(outcomes)} recorded: {len(outcomes) - ran} not run"
    )


def _compare(
    op: str,
    name: str,
    want: Mapping[str, Want],
    outputs: Mapping[str, Tensor],
    recorded: Mapping[str, Tensor],
) -> Outcome:
    wrong = _wrong(want, outputs)
    if not wrong and (bad := _wrong(want, recorded)):
        wrong = f"recorded: {bad}"
    same = total = 0
    for part, w in _parts(want).items():
        if w.free:
            continue
        bits = same_bits(outputs[part], recorded[part])
        same += int(bits.sum())
        total += bits.numel()
        exact = ~w.named if any(c.slack is not None for c in w.candidates) else torch.ones_like(w.named)
        if len(w.candidates) > 1:
            # Equal slots: which of the candidates it is may differ.
            exact = ~w.named
        if not wrong and not bool((bits | ~exact).all()):
            wrong = f"{part}: {int((~bits & exact).sum())} elements are not the recorded bits"
    return Outcome(op, name, not wrong, wrong, same / total if total else 1.0)


def _parts(want: Mapping[str, Want]) -> dict[str, Want]:
    """A `Want` for each tensor; those of a pool are ``dst.k``, ``dst.v``."""
    parts = {}
    for name, w in want.items():
        if w.fields:
            parts.update({f"{name}.{half}": f for half, f in w.fields.items()})
        else:
            parts[name] = w
    return parts


def _outputs(want: Mapping[str, Want], args: Mapping[str, Any], result: Any) -> dict[str, Tensor]:
    from hal.ops.kv_transfer import stacked

    out = {}
    for part in _parts(want):
        name, _, half = part.partition(".")
        value = result if name == "return" else args[name]
        out[part] = (stacked(getattr(value, half)) if half else value).cpu().contiguous()
    return out


def _wrong(want: Mapping[str, Want], outputs: Mapping[str, Tensor]) -> str:
    for part, w in _parts(want).items():
        ok = right_any(outputs[part], w)
        if not bool(ok.all()):
            return f"{part}: {int((~ok).sum())} of {ok.numel()} elements are not what the contract allows"
    return ""


def _packed(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as tensors and plain values; strided views keep their strides."""

    def tensor(t: Tensor) -> dict[str, Any]:
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        return {
            "data": t.as_strided((extent,), (1,)).clone(),
            "shape": list(t.shape),
            "stride": list(t.stride()),
        }

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": tensor(value)}
        if isinstance(value, KVPool):
            halves = {h: getattr(value, h) for h in ("k", "v")}
            lists = {
                h: [tensor(t) for t in ((x,) if isinstance(x, Tensor) else x or ())]
                for h, x in halves.items()
            }
            return {
                "pool": lists,
                "layout": value.layout,
                "page_size": value.page_size,
                "list": isinstance(value.k, tuple),
            }
        if isinstance(value, range):
            return {"range": [value.start, value.stop]}
        return {"value": value}

    return {name: one(value) for name, value in args.items()}


def _unpacked(value: Mapping[str, Any]) -> Any:
    def tensor(kept: Mapping[str, Any]) -> Tensor:
        data: Tensor = kept["data"]
        return data.clone().as_strided(kept["shape"], kept["stride"])

    if "tensor" in value:
        return tensor(value["tensor"])
    if "range" in value:
        return range(*value["range"])
    if "pool" in value:
        halves = [[tensor(t) for t in value["pool"][h]] for h in ("k", "v")]
        k, v = ((h or None) if value["list"] else (h[0] if h else None) for h in halves)
        assert k is not None
        return KVPool(k, v, layout=value["layout"], page_size=value["page_size"])
    return value["value"]


def _to(value: Any, device: str) -> Any:
    """On `device`, a strided view with its strides."""

    def tensor(t: Tensor) -> Tensor:
        if device == "cpu":
            return t
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        return t.as_strided((extent,), (1,)).to(device).as_strided(t.shape, t.stride())

    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, KVPool):
        k, v = (
            x if x is None else tensor(x) if isinstance(x, Tensor) else [tensor(t) for t in x]
            for x in (value.k, value.v)
        )
        assert k is not None
        return KVPool(k, v, layout=value.layout, page_size=value.page_size)
    return value


def _made(backend: str, device: str) -> dict[str, str]:
    import hal

    made = {
        "hal": hal.__version__,
        "torch": str(torch.__version__),
        "backend": backend,
        "python": platform.python_version(),
    }
    if device.startswith("cuda"):
        made["device"] = torch.cuda.get_device_name()
    return made


def main(argv: list[str] | None = None) -> int:
    """``python -m hal.golden record|replay FOLDER --backend NAME --device TYPE``.

    Returns:
        0 ok, 1 a case failed, 2 a wrong option, 3 nothing ran.
    """
    parser = argparse.ArgumentParser(prog="python -m hal.golden", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    given = parser.parse_args(argv)
    try:
        return _run(given)
    except HalError as e:
        print(e, file=sys.stderr)
        return 2 if isinstance(e, SelectionError) else 1


def _run(given: argparse.Namespace) -> int:
    if given.what == "record":
        for path in record(given.folder, given.backend, given.device):
            print(f"{path}  {path.stat().st_size} bytes")
        return 0
    outcomes = replay(given.folder, given.backend, given.device)
    if given.json:
        print(json.dumps([asdict(o) for o in outcomes], indent=1))
    else:
        for o in outcomes:
            print(
                f"{'pass' if o.passed else 'FAIL' if o.ran else '----'}  {o.op:26}{o.case:36}"
                f"{o.same:7.2%} same bits  {o.detail}"
            )
        print(summary(outcomes))
    return exit_code(outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
