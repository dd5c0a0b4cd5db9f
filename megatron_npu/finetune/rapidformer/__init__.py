"""The Python interface of PAI-Rapidformer (document 001): engine, templates, scripts."""
