"""Readers for untrusted files, which do not execute code from these files."""
