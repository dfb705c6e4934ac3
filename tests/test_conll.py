"""CoNLL files in the forms that are around: which column has the tokens and which the tags, and what is a comment."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_own_tasks import read

from model.errors import InputError
from tasks.glue import conll

WORDS = [
    "the", "river", "clock", "letter", "saw", "near", "of", "#", "#fun", "3", "12", "went", "home",
    "Anna", "Otto", "Hull", "York",
]  # fmt: skip
RNG = np.random.default_rng(0)
SENTENCES = [[WORDS[k] for k in RNG.integers(len(WORDS), size=RNG.integers(1, 9))] for _ in range(80)]
KINDS = {"Anna": "PER", "Otto": "PER", "Hull": "LOC", "York": "LOC"}


def tag(word: str) -> str:
    return f"B-{KINDS[word]}" if word in KINDS else "O"


def pos(word: str) -> str:
    return "PROPN" if word in KINDS else "NUM" if word.isdigit() else "NOUN"


EXPECTED = {
    "ner": [[tag(word) for word in words] for words in SENTENCES],
    "pos": [[pos(word) for word in words] for words in SENTENCES],
}


def written(path: Path, rows: Callable, above: Callable = lambda i, words: [], separator: str = "\t") -> Path:
    """A file of the sentences; `rows` and `above` tell the rows of one, and the lines above it."""
    lines = []
    for i, words in enumerate(SENTENCES):
        lines += [*above(i, words), *(separator.join(row) for row in rows(i, words)), ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def universal(i: int, words: list[str]) -> list[list[str]]:
    """CoNLL-U, with a range above the first token and an empty node after the last."""
    rest = ["_"] * 8
    rows = [
        [str(n), word, word.lower(), pos(word), "X", "_", str(n - 1), "dep", "_", "SpaceAfter=No" if n % 3 else "_"]
        for n, word in enumerate(words, 1)
    ]
    return [["1-2", "xx", *rest], *rows, [f"{len(words)}.1", "ghost", *rest]]


def of_2012(i: int, words: list[str]) -> list[list[str]]:
    """CoNLL-2012, whose number of columns differs between sentences."""
    spans = {"O": "*", "B-PER": "(PER)", "B-LOC": "(LOC)"}
    return [
        ["bc/cctv/00/cctv_0000", "0", str(n), word, pos(word), "(TOP*)", "-", "-", "-", "Anna", spans[tag(word)]]
        + ["*"] * (i % 3) + ["-" if n % 4 else f"({n})"]
        for n, word in enumerate(words)
    ]  # fmt: skip


def germeval(i: int, words: list[str]) -> list[list[str]]:
    return [[str(n), word, tag(word), "B-LOC" if n == 4 else "O"] for n, word in enumerate(words, 1)]


def of_2003(i: int, words: list[str]) -> list[list[str]]:
    return [[word, "NN", "I-NP" if n else "B-NP", tag(word)] for n, word in enumerate(words)]


def two(i: int, words: list[str]) -> list[list[str]]:
    return [[word, tag(word)] for word in words]


UNIVERSAL = universal, lambda i, words: [f"# sent_id = {i}", f"# text = {' '.join(words)}", "# newpar"]
OF_2012 = of_2012, lambda i, words: [] if i % 9 else ["#begin document (bc/cctv/00); part 000"]
GERMEVAL = germeval, lambda i, words: [f"#\thttp://de.wikipedia.org/wiki/{i} [2009-10-17]"]
OF_2003 = of_2003, lambda i, words: [] if i % 9 else ["-DOCSTART- -X- O O", ""]


@pytest.mark.parametrize(
    ("name", "form", "separator", "asked", "expected"),
    [
        ("a.conllu", UNIVERSAL, "\t", {"label": "UPOS"}, "pos"),
        ("a.conll", UNIVERSAL, "\t", {"label": "4", "text": "2"}, "pos"),
        ("a.gold_conll", OF_2012, "   ", {"label": "5"}, "pos"),
        ("a.gold_conll", OF_2012, "   ", {"label": "11"}, "ner"),
        ("NER-de-train.tsv", GERMEVAL, "\t", {"label": "3"}, "ner"),
        ("a.txt", OF_2003, " ", {}, "ner"),
        ("a.conll", OF_2003, " ", {"label": "2", "text": "1"}, None),
        ("wnut17.conll", (two,), "\t", {}, "ner"),
        ("a.tsv", (two,), "\t", {"label": "2", "text": "1"}, "ner"),
        ("a.bio", (two, lambda i, words: [] if i % 7 else ["# newdoc"]), " ", {}, "ner"),
        ("a.bio", (two, lambda i, words: [f"# text = {' '.join(words)}", f"#id={i}"]), " ", {}, "ner"),
        ("a.conll", (lambda i, words: [[w, "_", "_", tag(w)] for w in words],
                     lambda i, words: [f"# id {i}-5239\tdomain=train"]), " ", {}, "ner"),
        ("a.conll", (lambda i, words: [[f"doc {i // 9}", w, tag(w)] for w in words],), "\t", {}, "ner"),
        ("a.conll", (lambda i, words: [[tag(w), w] for w in words],), "\t", {"text": "2", "label": "1"}, "ner"),
        ("a.conll", (lambda i, words: [[w, tag(w), ""] for w in words],), "\t", {}, "ner"),
    ],
)  # fmt: skip
def test_tokens_and_tags_are_those_that_were_written(tmp_path: Path, name, form, separator, asked, expected):
    path = written(tmp_path / name, *form, separator=separator)
    found = [row for _, row in conll.sentences(path, "a", **asked)]
    assert [row[asked.get("text", "tokens")] for row in found] == SENTENCES
    tags = [row[asked.get("label", "tags")] for row in found]
    assert tags == (EXPECTED[expected] if expected else [["NN"] * len(words) for words in SENTENCES])
    if expected:
        assert sum(len(table) for table in read(path, kind="tokens", **asked).tables.values()) == len(SENTENCES)


@pytest.mark.parametrize(
    ("name", "form", "separator", "asked", "words"),
    [
        ("a.conllu", UNIVERSAL, "\t", {}, ["label", "4 (UPOS)", "line 5"]),
        ("a.conllu", UNIVERSAL, "\t", {"label": "ner"}, ["label", "'ner'", "1 to 10", "4 (UPOS)"]),
        ("a.conllu", UNIVERSAL, "\t", {"label": "11"}, ["label", "'11'", "1 to 10"]),
        ("a.conllu", UNIVERSAL, "\t", {"label": "FORM"}, ["label", "column 2"]),
        ("a.conll", OF_2012, " ", {}, ["label", "5 'NUM'", "12 '(0)'"]),
        ("a.tsv", GERMEVAL, "\t", {}, ["label", "columns 3 and 4", "LOC"]),
        ("a.tsv", (lambda i, words: [[str(n), w, tag(w), "O"] for n, w in enumerate(words)],), "\t", {},
         ["label", "columns 3 and 4"]),
        ("a.conll", (lambda i, words: [[tag(w), w] for w in words],), "\t", {}, ["text", "line 1"]),
        ("a.conll", (lambda i, words: [[tag(w), pos(w)] for w in words],), "\t", {}, ["text"]),
        ("a.conll", (lambda i, words: [[str(n), tag(w)] for n, w in enumerate(words)],), "\t", {}, ["text"]),
        ("a.conll",
         (lambda i, words: [[w, tag(w)] if n or i != 5 else ["New", w, tag(w)] for n, w in enumerate(words)],),
         " ", {}, ["line 31 has 2 fields", "line 30 has 3"]),
    ],
)  # fmt: skip
def test_columns_that_are_not_clear_are_refused_by_the_field_and_shown(tmp_path, name, form, separator, asked, words):
    path = written(tmp_path / name, *form, separator=separator)
    with pytest.raises(InputError) as problem:
        read(path, kind="tokens", **asked)
    message = str(problem.value)
    assert f"mine/{name}" in message
    assert not [word for word in words if word.lower() not in message.lower()], message


@pytest.mark.parametrize(("separator", "end"), [(" ", "\n"), ("\t", "\r\n"), ("  ", "\r")])
def test_odd_tokens_are_those_that_were_written(tmp_path: Path, separator: str, end: str):
    odd = ["-DOCSTARTS-", "\u00a0", "\u2028", "\u0085", "#", "O", '"', "1,5", "Anna"]
    rng = np.random.default_rng(0)
    lines = ["-DOCSTART- -X- -X- O", "", ""]
    expected = []
    for _ in range(40):
        tokens = [odd[i] for i in rng.integers(1, len(odd), size=rng.integers(1, 6))]
        tags = [str(rng.choice(["O", "B-X"])) for _ in tokens]
        lines += [separator.join((token, "NN", tag)) for token, tag in zip(tokens, tags, strict=True)]
        lines += [""] * int(rng.integers(1, 3))
        expected.append({"tokens": tokens, "tags": tags})
    (tmp_path / "a.conll").write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
    assert [row for _, row in conll.sentences(tmp_path / "a.conll", "a")] == expected


def test_spans_in_brackets_are_those_in_bio():
    given = [["(ORG*", "*", "*)", "*", "(PER)", "(PER)"], ["*", "(A*", "*)"]]
    expected = [["B-ORG", "I-ORG", "I-ORG", "O", "B-PER", "B-PER"], ["O", "B-A", "I-A"]]
    assert conll.without_brackets(given) == expected
    nested = [["(TOP(S*", "*))"], ["*"]]
    assert conll.without_brackets(nested) == nested
    assert conll.without_brackets(expected) == expected


def test_a_tag_for_each_token_is_refused_and_a_large_tag_set_is_not(tmp_path: Path):
    words = [f"w{i}" for i in range(700)]
    for count, fits in ((250, True), (650, False)):
        lines = [f"{word}\tt{i % count}" + "\n" * (i % 5 == 0) for i, word in enumerate(words)]
        path = tmp_path / f"{count}.conll"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if fits:
            assert len(read(path, kind="tokens").task.labels) == count
        else:
            with pytest.raises(InputError, match=r"650 different labels in 700 tokens.*label"):
                read(path, kind="tokens")


def test_a_line_that_names_the_columns_is_left_out_and_a_tag_of_that_name_stays(tmp_path: Path):
    path = written(tmp_path / "a.tsv", two, separator="\t")
    text = path.read_text(encoding="utf-8")
    path.write_text("token\ttag\n" + text, encoding="utf-8")
    assert [row["tokens"] for _, row in conll.sentences(path, "a")] == SENTENCES
    path.write_text(f"token\ttag\n{text}\nother\ttag\n", encoding="utf-8")
    assert next(conll.sentences(path, "a"))[1]["tokens"] == ["token", *SENTENCES[0]]


def test_a_tsv_with_a_header_is_a_table(tmp_path: Path):
    lines = ["tokens\ttags", *(f"['a', '{i}']\t['O', 'B-X']" for i in range(40))]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for asked in ({}, {"text": "tokens", "label": "tags"}):
        assert read(tmp_path / "a.tsv", kind="tokens", **asked).task.labels == ("B-X", "O")


def test_a_folder_of_universal_dependencies_is_found_by_its_splits(tmp_path: Path):
    for split in ("train", "dev", "test"):
        written(tmp_path / f"en_x-ud-{split}.conllu", *UNIVERSAL)
    data = read(tmp_path, kind="tokens", label="upos")
    assert [*data.tables] == ["train", "validation", "test"]
    assert data.task.labels == ("NOUN", "NUM", "PROPN")
