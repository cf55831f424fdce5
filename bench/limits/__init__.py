"""What the kernels must read, write and send, and how fast hardware could do that at best."""
