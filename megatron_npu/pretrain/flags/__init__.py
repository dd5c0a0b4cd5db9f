"""The driver's flags: declared, checked, resolved."""
