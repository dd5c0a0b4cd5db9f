"""Define the Triton kernels.

Each module of this package imports triton. Only launchers import these modules, at the first launch.
"""
