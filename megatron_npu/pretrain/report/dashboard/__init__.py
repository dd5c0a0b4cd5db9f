"""Serve a local web dashboard of a run, with curves and sample texts from its JSON-lines file.

A separate process (``server``) serves the page and ends with the run, so training steps take no longer, and
neither process can crash the other. ``megatron-npu dashboard`` serves finished and running jobs.
"""
