"""GLUE: its tasks and data, metrics and probes."""
