"""The manifest of `torch-npu`: torch_npu's fused attention. Data alone; nothing here imports torch.

It has never run on an NPU. Take it by name, beside hal's own kernels:
``HAL_BACKEND=ascend,decode_attention=torch-npu,extend_attention=torch-npu``.
"""

from hal.registry import Backend, Impl, hookimpl

OPS = ("decode_attention", "extend_attention")


@hookimpl
def hal_backend() -> Backend:
    here = f"{__name__}.attention"
    return Backend(
        name="torch-npu",
        api=1,
        lanes={"device": ("npu",)},
        ops={op: Impl(f"{here}:{op}", supports=f"{here}:supports_{op}", note="never run on an NPU") for op in OPS},
        requires=("torch-npu>=2.6",),
        probe=f"{here}:probe",
        limits={"torch-npu": "torch_npu's attention takes these tensors and options alone"},
    )
