"""What SGLang wraps at start. No tensor of an emulated device is shared between processes."""

from typing import Any, NoReturn


def rebuild_npu_tensor(*args: Any) -> NoReturn:
    raise NotImplementedError("not emulated: a tensor shared between processes")
