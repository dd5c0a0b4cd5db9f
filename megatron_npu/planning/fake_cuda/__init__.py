"""CUDA devices that do not exist: torch's fake tensors on `cuda`, and process groups without other ranks."""
