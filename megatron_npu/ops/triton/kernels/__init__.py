"""The kernels themselves. Each module imports triton: launchers alone import them, when they launch."""
