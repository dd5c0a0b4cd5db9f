"""Simulated CUDA devices: torch's fake tensors on `cuda`, and process groups without other ranks."""
