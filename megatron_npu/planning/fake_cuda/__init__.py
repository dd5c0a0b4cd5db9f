"""CUDA devices that do not exist: torch's fake tensors on `cuda`, and groups without peers."""
