"""Define the Triton kernels, which only launchers import, at the first launch.

Each module of this package imports triton.
"""
