"""Triton kernels that the CUDA and ROCm backends will share. A library: it registers nothing, and is empty so far."""
