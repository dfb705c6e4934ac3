"""The start of `cram`. It imports nothing slow, so from the first moment a signal ends the command with a sentence."""

from flows.cli.ending import signals_as_sentences


def main() -> None:
    """Run the command line."""
    with signals_as_sentences():
        from flows.cli.main import main as run  # here, since it takes half a second

        run()
