"""Simulated CUDA devices, based on torch's fake tensors on `cuda` and process groups without other ranks."""
