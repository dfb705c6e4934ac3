"""The start of `cram`. It imports nothing slow, so a signal ends the command in a sentence from its first moment on."""

from flows.cli.ending import signals_as_sentences


def main() -> None:
    """Run the command line."""
    with signals_as_sentences():
        from flows.cli.main import main as run  # here: it takes half a second

        run()
