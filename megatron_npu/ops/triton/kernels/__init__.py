"""The kernels. Each module imports triton; launchers import them only at launch."""
