"""The platform that can't be made, with the reason: SGLang ends its start by what a platform's constructor raises."""

from __future__ import annotations

from sglang.srt.platforms.interface import SRTPlatform

from hal.engines import sglang


class Refused(SRTPlatform):
    def __init__(self) -> None:
        assert sglang.obstacle is not None
        raise sglang.obstacle
