"""What goes wrong in the lowered lane, as errors that name the kernel, the argument and the program."""

from __future__ import annotations

from hal._errors import HalError


class LoweredError(HalError, RuntimeError):
    """A kernel could not be lowered, or did something that it must not."""


class ToolchainError(LoweredError):
    """The packages that lower and run Ascend kernels are missing or are not the ones expected."""


class LoweringError(LoweredError):
    """The compiler refused the kernel. ``stage`` says where, ``detail`` is what it printed."""

    def __init__(self, kernel: str, stage: str, detail: str) -> None:
        super().__init__(kernel, stage, detail)
        self.kernel, self.stage, self.detail = kernel, stage, detail

    def __str__(self) -> str:
        return f"hal: kernel {self.kernel}: {self.stage} failed:\n{self.detail.strip()}"


class AccessError(LoweredError):
    """A program touched memory that is not its argument's. The access was not carried out.

    Attributes:
        kernel: the kernel's name.
        argument: the parameter through which it was reached; None for a pointer that is no argument's.
        program: the program id, ``(x, y, z)``.
        kind: ``read`` or ``write``.
        distance: bytes from the nearest byte of the argument: negative before its start, positive past its
            end, 0 for a byte between the rows of a strided view.
        size: bytes accessed.
    """

    def __init__(
        self, kernel: str, argument: str | None, program: tuple[int, int, int], kind: str, distance: int, size: int
    ) -> None:
        super().__init__(kernel, argument, program, kind, distance, size)
        self.kernel, self.argument, self.program = kernel, argument, program
        self.kind, self.distance, self.size = kind, distance, size

    def __str__(self) -> str:
        head = f"hal: kernel {self.kernel}, program {self.program}: {self.kind} of {self.size} bytes "
        if self.argument is None:
            return head + "through a pointer that is no argument's"
        if self.distance < 0:
            where = f"{-self.distance} bytes before the start of"
        elif self.distance > 0:
            where = f"{self.distance} bytes past the end of"
        else:
            where = "between the rows of the strided"
        return f"{head}{where} {self.argument}"


class RaceError(LoweredError):
    """Two programs of one launch touched one byte, and at least one of them wrote it.

    Attributes:
        kernel: the kernel's name.
        argument: the parameter through which the second access came.
        program: the program id of the second access.
        other: that of the first.
        kind: ``read`` or ``write``, of the second access.
        offset: bytes from the argument's first element.
    """

    def __init__(
        self,
        kernel: str,
        argument: str,
        program: tuple[int, int, int],
        other: tuple[int, int, int] | None,
        kind: str,
        offset: int,
    ) -> None:
        super().__init__(kernel, argument, program, other, kind, offset)
        self.kernel, self.argument, self.program, self.other = kernel, argument, program, other
        self.kind, self.offset = kind, offset

    def __str__(self) -> str:
        first = "several programs have read" if self.other is None else f"program {self.other} has touched"
        return (
            f"hal: kernel {self.kernel}: race on {self.argument}, byte {self.offset}: "
            f"program {self.program} would {self.kind} what {first}"
        )
