"""Is the library right on this GPU, and how fast are its kernels: one command, some minutes.

Needs torch, triton and numpy, and nothing else. Each part runs in a process of its own, so that a part
that hangs, or breaks the GPU's context, leaves the others as they are.
"""
