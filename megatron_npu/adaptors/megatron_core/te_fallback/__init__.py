"""The local layers in place of TransformerEngine's, where it is not installed; each time it is said.

``redirect`` has the tools, the other modules use them: one per family of models.
"""
