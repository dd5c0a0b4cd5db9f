"""Attention over a sequence that is sharded over a context-parallel group.

``ring`` is ``--cp-comm-type p2p``: keys and values travel from rank to rank; ``visible`` says what each step
computes of them. ``sequence`` has what
``all_gather`` and ``a2a`` need: collectives with gradients, and the load-balanced order of chunks. ``packed``
says which tokens of packed sequences a rank holds, and which keys those see.
"""
