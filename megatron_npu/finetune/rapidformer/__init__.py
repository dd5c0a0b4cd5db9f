"""Implement the Python interface of PAI-Rapidformer (document 001): the engine, templates and scripts."""
