"""A local web dashboard of a run: curves and samples from its JSON lines.

The page is served by a process of its own (``server``), which ends with the run: a step costs nothing more,
and neither can bring the other down. ``megatron-npu dashboard`` serves a run that has ended or goes on.
"""
