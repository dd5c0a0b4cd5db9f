"""A local page that follows a run: its curves and samples, from the file of JSON lines that the run writes.

The page is served by a process of its own (``server``), which ends with the run: a step costs nothing more,
and neither can bring the other down. ``megatron-npu dashboard`` serves a run that has ended or goes on.
"""
