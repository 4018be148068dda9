"""How Triton kernels are started: the launcher, and the interpreter lane."""
