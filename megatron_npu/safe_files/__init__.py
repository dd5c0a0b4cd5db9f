"""Readers of untrusted files that do not execute code."""
