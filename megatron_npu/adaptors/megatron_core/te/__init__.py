"""Local layers instead of TransformerEngine's if it is not installed; the ledger and the log say so.

``redirect`` holds the helpers; each of the other modules uses them for one family of models.
"""
