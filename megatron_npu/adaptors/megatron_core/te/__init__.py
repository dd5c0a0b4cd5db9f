"""Use local layers in place of TransformerEngine's layers if TransformerEngine is not installed.

The ledger and the log report this. ``redirect`` contains the helpers; each of the other modules uses them for
one family of models.
"""
