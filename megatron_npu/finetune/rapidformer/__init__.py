"""Implement the Python interface of PAI-Rapidformer (document 001): engine, templates and scripts."""
