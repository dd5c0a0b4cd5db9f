"""Each adaptor against the stock function, on the real tree; see ``test_checks``."""
