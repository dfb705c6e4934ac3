"""GLUE: its tasks and data, metrics, probes and submission files."""
