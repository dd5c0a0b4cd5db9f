"""Stub for apex, which contains only ``apex.optimizers`` and ``apex.multi_tensor_apply``."""
