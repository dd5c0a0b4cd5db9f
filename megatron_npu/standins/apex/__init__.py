"""Stub for apex: only ``apex.optimizers`` and ``apex.multi_tensor_apply``."""
