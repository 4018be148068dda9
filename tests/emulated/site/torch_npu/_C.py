"""Names of torch_npu's extension: what triton-ascend's driver asks for, and HCCL for groups of one process."""

from typing import Any

from torch_npu._runtime import lib


def _npu_getCurrentRawStream(device: int) -> int:
    return int(lib.npu_stream(device))


class _distributed_c10d:
    class ProcessGroupHCCL:
        class Options:
            """Taken, and read by nobody."""

            hccl_config: dict[str, Any]

    @staticmethod
    def hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        """A group that has no collective for a tensor of a device: gloo refuses each."""
        from torch.distributed import ProcessGroupGloo

        if size != 1:
            raise NotImplementedError("not emulated: HCCL between processes")
        return ProcessGroupGloo(store, rank, size, timeout)
