"""Whether this backend can run here, and if not, the one reason and what to do about it."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

_CANN = (
    "source the toolkit's set_env.sh (ASCEND_HOME_PATH) in this shell; where there is none, install CANN, "
    "or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 so that `import torch` leaves torch_npu alone"
)


def lowered() -> str | None:
    """None, or why kernels can't be lowered and run on the CPU here."""
    from hal.lowered import missing

    return missing()


def device() -> str | None:
    """None, or why no kernel can run on an NPU here. Imports torch_npu only where that can't do harm."""
    if why := triton_owner():
        return why
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install torch-npu, of the version that goes with this torch"
    try:
        import torch
    except (ImportError, RuntimeError) as e:
        return f"`import torch` fails while it loads torch_npu ({_first(e)}): {_CANN}"
    if torch.version.cuda is not None:
        return (
            f"torch {torch.__version__} is a CUDA build; torch_npu and it can't share a process: install the "
            "CPU build of torch and torch-npu in an environment of their own"
        )
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as e:
        return f"torch_npu is installed but does not load ({_first(e)}): {_CANN}"
    del torch_npu
    try:
        npu = getattr(torch, "npu")  # noqa: B009 - torch_npu adds it
        count = npu.device_count() if npu.is_available() else 0
    except (AttributeError, RuntimeError) as e:
        return f"torch_npu loaded but its driver does not answer ({_first(e)}): look at npu-smi info"
    if count == 0:
        return "no NPU: torch_npu sees none; look at npu-smi info, and at ASCEND_RT_VISIBLE_DEVICES"
    return None


def status() -> dict[str, str]:
    """The NPUs by their names, for `hal info`; nothing where there is none."""
    if device() is not None:
        return {}
    import torch

    npu = torch.get_device_module("npu")
    return {f"npu:{i}": str(npu.get_device_name(i)) for i in range(npu.device_count())}


def triton_owner() -> str | None:
    """None, or why the folder of the package `triton` is not triton-ascend's.

    ``triton`` and ``triton-ascend`` both install it; whichever came last owns it, and pip says nothing.
    """
    remedy = (
        "pip uninstall -y triton triton-ascend && pip install triton-ascend==3.2.0, in an environment "
        "without triton (a CUDA torch from PyPI brings it)"
    )
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        have = _version("triton-ascend")
        if have is None:
            return "triton-ascend is not installed: pip install triton-ascend==3.2.0"
        return f"triton-ascend {have} is installed but its package triton is gone: {remedy}"
    if not (Path(spec.origin).parent / "backends" / "ascend").is_dir():
        return f"the package triton here is not triton-ascend's{_and('triton')}: {remedy}"
    if _version("triton") is not None:
        return f"triton and triton-ascend are both installed, and share one folder{_and('triton')}: {remedy}"
    return None


def _and(name: str) -> str:
    version = _version(name)
    return f" ({name} {version} is installed)" if version else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
