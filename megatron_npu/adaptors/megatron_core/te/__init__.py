"""Local layers in place of TransformerEngine's where it is not installed; the ledger and the log say so.

``redirect`` has the tools; the other modules use them, one for each family of models.
"""
