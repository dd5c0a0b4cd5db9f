"""Attention over a sequence that is sharded over a context-parallel group.

``ring`` is ``--cp-comm-type p2p``: keys and values are passed from rank to rank; ``visible`` determines what
each step computes with them. ``sequence`` holds what ``all_gather`` and ``a2a`` need: collectives with
gradients, and the load-balanced order of chunks. ``packed`` determines which tokens of packed sequences a
rank holds, and which keys they see.
"""
