"""The stages of the pipeline, one a file."""
