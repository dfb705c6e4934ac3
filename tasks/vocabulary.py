"""Vocabulary: WordPiece, trained from scratch on the corpus; the same bytes from the same corpus every time.

Reads   the parts of a corpus.
Writes  tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer loads.
"""

import json
import shutil
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash
from pydantic import Field
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from model import InputError
from tasks.corpus import documents_of
from tasks.progress import Progress
from tasks.stage import Artifact, Params, stage

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are their places
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
FILES = ("tokenizer.json", "tokenizer_config.json")
# what the normaliser leaves, but for white space: printable ASCII without capitals
ALPHABET = sorted(set(string.printable) - set(string.whitespace) - set(string.ascii_uppercase))
PIECE_CHARACTERS = 1_000_000  # encoding takes 90 times its text in memory, so texts are encoded in pieces
DIGEST_RANGE = 2**64
LONGEST_WORD = 100  # characters; a longer one becomes [UNK], as in BERT


class Vocabulary(Params):
    """The WordPiece vocabulary (section 4.1)."""

    entries: int = Field(32_768, ge=256, le=65_536, description="With special tokens. Ids are stored in 16 bits.")
    sample_megabytes: float = Field(
        1000, gt=0, description="Train on so much text, 10^6 characters; of more, a fixed sample is taken."
    )
    min_frequency: int = Field(2, ge=1, description="Pairs seen less often are not merged.")


def normalizer() -> normalizers.Normalizer:
    """The reference's: plain quotes, no accents, lower case, printable ASCII only."""
    return normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"[^\x09-\x0d\x20-\x7e]+"), ""),
        ]
    )


def tokenizer_of(model: WordPiece) -> Tokenizer:
    """The tokenizer around a vocabulary: words and runs of punctuation, each in WordPieces; [CLS] A [SEP] B [SEP]."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def train(texts: Iterable[str], entries: int, min_frequency: int = 2) -> Tokenizer:
    """Train a vocabulary of at most so many entries.

    The trainer breaks ties by the order in which it meets the characters within words, which differs from run to
    run; so these are given ids beforehand, as if they were special tokens, and made plain entries afterwards.
    """
    learner = tokenizer_of(WordPiece(unk_token="[UNK]"))
    trainer = WordPieceTrainer(
        vocab_size=entries,
        min_frequency=min_frequency,
        special_tokens=[*SPECIALS, *(f"##{c}" for c in ALPHABET)],
        initial_alphabet=ALPHABET,
        limit_alphabet=len(ALPHABET),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    tokenizer = tokenizer_of(WordPiece(learner.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it as transformers expects it."""
    (folder / FILES[0]).write_text(tokenizer.to_str(pretty=True))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    config |= {"model_input_names": ["input_ids", "attention_mask"]}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


def copy(source: Path, folder: Path, length: int) -> None:
    """Copy it for models that take so many tokens."""
    shutil.copyfile(source / FILES[0], folder / FILES[0])
    config = json.loads((source / FILES[1]).read_text()) | {"model_max_length": length}
    (folder / FILES[1]).write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> Tokenizer:
    """Read it for raw text: a literal [MASK] in a document is text, not the special token."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / FILES[0]))
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{folder / FILES[0]} is no tokenizer: {error}. Run its stage again.") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of about a million characters, cut at white space, so that its tokens stay the same."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        ends = [end for end in (text.find(c, start + PIECE_CHARACTERS) for c in " \n\t") if end >= 0]
        end = min(ends, default=len(text))
        yield text[start:end]
        start = end
    yield text[start:]


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The token ids (uint16) of each text, without special tokens."""
    owners, waiting, size, found = [], [], 0, [[] for _ in texts]

    def flush() -> None:
        encoded = tokenizer.encode_batch_fast(waiting, add_special_tokens=False)
        for owner, encoding in zip(owners, encoded, strict=True):
            found[owner].append(np.array(encoding.ids, dtype=np.uint16))
        owners.clear()
        waiting.clear()

    for owner, text in enumerate(texts):
        for piece in pieces(text):
            if size and size + len(piece) > PIECE_CHARACTERS:
                flush()
                size = 0
            owners.append(owner)
            waiting.append(piece)
            size += len(piece)
    flush()
    return [np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for arrays in found]


def share(text: str, salt: int = 0) -> float:
    """A number in [0, 1) that depends on the text alone: below p for a fraction p of all texts."""
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"), seed=salt) / DIGEST_RANGE


def sample(corpus: Artifact, megabytes: float, label: str) -> Iterator[str]:
    """About so much text, 10^6 characters: always the same documents, all where there are no more."""
    characters = corpus.stats["characters"]
    fraction = 1e6 * megabytes / max(1, characters)
    with Progress(label, total=corpus.stats["documents"], unit="doc") as bar:
        for document in documents_of(corpus):
            bar.update()
            if fraction >= 1 or share(document.text, salt=1) < fraction:
                yield document.text


@stage(version=1, name="vocabulary")
def train_vocabulary(params: Vocabulary, corpus: Artifact, out: Path) -> dict:
    """Train the vocabulary; fails if the text doesn't give as many entries as asked for."""
    used = {"documents": 0, "characters": 0}

    def texts() -> Iterator[str]:
        for text in sample(corpus, params.sample_megabytes, "count words"):
            used["documents"] += 1
            used["characters"] += len(text)
            yield text

    tokenizer = train(texts(), params.entries, params.min_frequency)
    found = tokenizer.get_vocab_size()
    if found != params.entries:
        raise InputError(
            f"The corpus of {used['characters']:,} characters gives a vocabulary of {found:,} entries; "
            f"{params.entries:,} were asked for. Give more text (download), or lower vocabulary.entries."
        )
    save(tokenizer, out)
    words = [t for t in tokenizer.get_vocab() if t not in SPECIALS]
    whole = sum(not t.startswith("##") for t in words)
    return {"entries": found, "whole_words": whole, "continuations": len(words) - whole, "trained_on": used}
