"""Implement the Python interface of PAI-Rapidformer's documentation: the engine, templates and scripts."""
