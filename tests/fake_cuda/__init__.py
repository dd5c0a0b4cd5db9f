"""A CUDA device of which only shapes, dtypes and devices are real; see ``machine.py``."""
