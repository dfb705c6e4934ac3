"""The encoder and its training loops. Needs torch, numpy, safetensors and pydantic, nothing else."""


class InputError(ValueError):
    """Something the user can mend; says what was found, what was expected and what to do."""
