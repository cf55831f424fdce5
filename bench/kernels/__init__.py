"""`python -m bench kernels`: what the compiler makes of the kernels, and the rules it must keep."""
