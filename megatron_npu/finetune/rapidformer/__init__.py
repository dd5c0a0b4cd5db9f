"""The programming interface that document 001 (PAI-Rapidformer) describes: engine, templates, scripts."""
