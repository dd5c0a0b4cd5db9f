"""Compute attention over sequences that are sharded over a context-parallel group.

``ring`` implements ``--cp-comm-type p2p``: keys and values are passed from rank to rank; ``visible``
determines the computation of each step. ``sequence`` contains the helpers for ``all_gather`` and ``a2a``:
collectives with gradients, and the load-balanced order of chunks. ``packed`` determines which tokens of
packed sequences a rank holds, and which keys they see.
"""
