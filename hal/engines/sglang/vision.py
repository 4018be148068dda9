"""torchvision beside a CPU build of torch: SGLang imports it for every model, and its wheel is for CUDA's torch.

Its library does not load then, and its import ends at the first operator that the library should have declared. The
two that it names are declared here, without code: a model that asks for one gets torch's own error.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def declare_operators() -> None:
    """Declares what torchvision's import needs, where it is installed and its own library does not load."""
    found = importlib.util.find_spec("torchvision")
    if _declared or found is None or found.origin is None:
        return
    for file in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
        except OSError:
            continue
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _declared.append(library)
