"""The Triton kernels, one a file, each beside its launcher."""
