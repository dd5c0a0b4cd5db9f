"""Declare and check the flags of the built-in trainer, and derive other values from them."""
