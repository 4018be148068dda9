"""CANN's Python interface, for the one question that SGLang asks when it is imported."""


class rt:
    @staticmethod
    def get_device_info(device: int, attribute: int) -> tuple[int, int]:
        """(value, status): not the architecture 3510, an Ascend950's."""
        return 0, 0
