"""Readers for untrusted files that do not execute code from these files."""
