"""Fix upstream bugs that make results numerically wrong, if ``MEGATRON_NPU_BACKPORT=1`` is set.

The fixes change losses and gradients. Each fix states in ``versions`` which versions have the bug, and in
``until`` the version and the number of the upstream fix.
"""
