"""Stub for apex that contains only ``apex.optimizers`` and ``apex.multi_tensor_apply``."""
