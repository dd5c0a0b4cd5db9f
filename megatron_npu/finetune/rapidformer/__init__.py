"""Implementation of PAI-Rapidformer's Python interface (document 001): engine, templates and scripts."""
