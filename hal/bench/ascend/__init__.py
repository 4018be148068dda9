"""What Ascend kernels would take on a device that is not here: counted from their lowered code, and estimated."""
