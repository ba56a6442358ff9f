"""The Triton kernels as machine code, for GPUs that are not there."""
