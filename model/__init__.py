"""The encoder and its training loops. Needs torch, numpy, safetensors and pydantic; `hf.py` needs transformers too."""


class InputError(ValueError):
    """An error in the user's input or environment; its message says what was found, expected and what to do."""
