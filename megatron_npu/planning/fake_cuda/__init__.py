"""Simulate CUDA devices with torch's fake tensors and with process groups that have no other ranks."""
