"""One call of an op, judged: arguments placed where the backend takes them, the call, its results, every other byte.

The suite's proofs, ``hal doctor`` and the tests make their calls here::

    from hal.conformance.execute import execute
    from hal._remote.target import DirectTarget, RegistryTarget

    spec = hal.ops.get_spec("get_last_loc")
    execute(spec, spec.make(bs=7), RegistryTarget.of("cpu", "device"))
    execute(spec, spec.make(bs=7), DirectTarget.of("get_last_loc", my_function, "cuda"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hal._remote.target import Target
from hal._remote.wire import Task
from hal.conformance._arena import POISONS, Placed, Room, place
from hal.conformance._hands import Caller, caller_of
from hal.conformance._truths import pure_outputs
from hal.conformance._verdict import Failure, Ret, judge
from hal.ops.proofs.judge import Want
from hal.ops.spec import OpSpec, PoolArg

__all__ = ["BOUND", "DISPATCHED", "Executor", "Failure", "Refused", "execute"]

BOUND, DISPATCHED = "bound", "dispatched"


class Refused(Exception):
    """`supports` said no; the text is its reason."""


def execute(
    spec: OpSpec,
    arguments: Mapping[str, Any],
    target: Target | Caller,
    *,
    how: str = BOUND,
    poison: int = POISONS[0],
    shift: int = 0,
    where: str = "",
    side: str = "",
) -> dict[str, float]:
    """Calls an op once with copies of `arguments` and judges everything that came of it.

    Args:
        spec: the op's contract.
        arguments: by name, on the CPU, as `spec.make` gives them; they stay as they are.
        target: a backend on its lane and device (`RegistryTarget.of`), or a lone function (`DirectTarget.of`).
        how: ``bound``, the launcher that `hal.bind` hands out, or ``dispatched``, the public function.
        poison: the byte in everything that is no element of a tensor, and in pure outputs.
        shift: elements by which each tensor starts off its place.
        where: of pools: ``device-to-host`` and the like, a name in `hal.conformance._cases.PLACEMENTS`.
        side: ``end`` or ``start``: that side of each tensor lies at a page that ends the process when touched.

    Returns:
        Dtype of a result -> its largest error, in units of the bound.

    Raises:
        Refused: the backend does not support such arguments, and has written nothing.
        Failure: it did not do what the contract says; the text says where.
    """
    executor = Executor(target, spec)
    executor.execute(arguments, spec.oracle(arguments), how, poison, shift=shift, where=where, side=side)
    return executor.room


@dataclass
class Executor:
    """An op on a backend: places arguments, makes calls, judges what came of them.

    Args:
        target: the process that the backend runs in; or the backend itself, to call it in this one.
        around: what every call stands in, as `hal._remote.around` has it.
        room: dtype -> the largest error so far, in units of the bound.
    """

    target: Target | Caller
    spec: OpSpec
    around: tuple[str, Any] | None = field(default=None, kw_only=True)
    room: dict[str, float] = field(default_factory=dict, kw_only=True)

    @cached_property
    def caller(self) -> Caller:
        return caller_of(self.target)

    @property
    def op(self) -> str:
        return self.spec.name

    @property
    def device(self) -> str:
        """The type of the device that the backend is judged on."""
        return self.caller.device

    @cached_property
    def outputs(self) -> frozenset[str]:
        return pure_outputs(self.spec)

    @cached_property
    def written(self) -> frozenset[str]:
        return frozenset(self.spec.mutated)

    def execute(
        self,
        arguments: Mapping[str, Any],
        wants: Mapping[str, Want],
        how: str = BOUND,
        poison: int = POISONS[0],
        *,
        shift: int = 0,
        where: str = "",
        side: str = "",
        like: str = "",
    ) -> None:
        """One call, judged; see `execute` and, for `like`, `call`."""
        with self.caller.arena.borrow():
            placed = self.place(arguments, poison, shift, where, side)
            ret = self.call(placed, how, like=like)
            try:
                self.judge(wants, placed, ret)
            except Failure as e:
                raise Failure(f"{how} call: {e}") from None

    def place(
        self, arguments: Mapping[str, Any], poison: int = POISONS[0], shift: int = 0, where: str = "", side: str = ""
    ) -> Placed:
        """`arguments` in the shared memory, for the target's device; slots of ``method="direct"`` for the CPU, as it
        asks."""
        host: dict[str, str] = {}
        if self.device != "cpu" and any(isinstance(a, PoolArg) for a in self.spec.args.values()):
            source, _, rest = where.partition("-to-")
            if source == "host":
                host["src"] = "pinned"
            if rest.startswith("host"):
                host["dst"] = "pinned"
            if rest.endswith("cpu-slots") or arguments.get("method") == "direct" or where == "host-to-host":
                host |= {"src_slots": "host", "dst_slots": "host"}
        return place(
            arguments,
            Room(self.caller.arena, side=side),
            poison=poison,
            outputs=self.outputs,
            shift=shift,
            where=host,
            apart=self.written,
        )

    def do(self, kind: str, *placed: Placed, **options: Any) -> Mapping[str, Any]:
        """What the backend's process says of a task."""
        answer = self.caller.do(Task(kind, self.op, tuple(p.arguments for p in placed), options))
        if answer["outcome"] == "broke":
            raise Failure(f"{answer['type']}: {answer['text']}\n{answer['trace']}")
        return answer

    def call(self, placed: Placed, how: str = BOUND, **options: Any) -> Ret:
        """Calls the op; raises `Refused`, or `Failure` where anything but the backend's own launcher ran it.

        With ``keep`` the backend's process keeps what it returned, for the task ``again``; calls of the same ``like``,
        a name, are made of the first one's launcher.
        """
        return Ret.of(self.ask(placed, how, **options)["ret"], placed)

    def ask(self, placed: Placed, how: str = BOUND, **options: Any) -> Mapping[str, Any]:
        """`call`, with what the manifest says of the implementation that ran."""
        answer = self.do("call", placed, how=how, around=self.around, **options)
        if answer["outcome"] == "refused":
            if answer["through"]:
                raise Failure(f"bind refuses ({answer['why']}), but the dispatched call does not raise")
            check_untouched(placed, "refused, yet something was written")
            raise Refused(answer["why"])
        if answer["outcome"] == "raised":
            says = f"supports said yes, and the {how} call raised"
            raise Failure(f"{says} {answer['type']}: {answer['text']}\n{answer['trace']}")
        if answer["others"]:
            ran = ", ".join(answer["others"])
            raise Failure(
                f"fell back in secret: the {how} call ran {ran}'s code (docs/sharing-code.md: what may be shared)"
            )
        if not answer["own"]:
            raise Failure(f"the {how} call did not run the backend's own {answer['impl']}")
        return answer

    def judge(self, wants: Mapping[str, Want], placed: Placed, ret: Ret) -> None:
        for dtype, worst in judge(wants, placed, ret, self.device).items():
            self.room[dtype] = max(self.room.get(dtype, 0.0), worst)


def check_untouched(placed: Placed, otherwise: str) -> None:
    """Raises `Failure` where anything at all was written."""
    for block in placed.all():
        changed = block.changes(None)
        if changed is not None:
            raise Failure(f"{otherwise}: {changed}")
