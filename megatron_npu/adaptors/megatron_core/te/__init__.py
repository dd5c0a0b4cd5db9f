"""Local layers instead of TransformerEngine's if it is not installed; the ledger and the log show it.

``redirect`` has the tools; the other modules use them, one for each family of models.
"""
