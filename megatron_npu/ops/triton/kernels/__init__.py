"""Define the Triton kernels. Each module imports triton; launchers import these modules only at launch."""
