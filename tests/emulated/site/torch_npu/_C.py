"""The one name of torch_npu's extension that triton-ascend's driver asks for."""

from torch_npu._runtime import lib


def _npu_getCurrentRawStream(device: int) -> int:
    return int(lib.npu_stream(device))
