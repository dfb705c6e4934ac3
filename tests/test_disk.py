"""The disk: parts that don't change are kept once."""

import os
from pathlib import Path

import pytest
from conftest import bytes_of, corpus_of, texts_of

from tasks.corpus.parts import link, parts_of, tables, writer
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.store import discard, verify

SAME = {
    "no method": (deduplicate, Deduplicate(methods=[])),
    "no duplicates": (deduplicate, Deduplicate()),
    "no search": (decontaminate, Decontaminate(data="probes")),
}


@pytest.mark.parametrize("kind", SAME)
def test_parts_that_stay_as_they_are_are_kept_once(store: Path, tmp_path: Path, toy_texts, monkeypatch, kind: str):
    (stage, params), corpus = SAME[kind], corpus_of(tmp_path, toy_texts)
    parts_of(corpus)[0].chmod(0o640)  # as after a change of the umask
    made = stage.fn(params, corpus)
    assert parts_of(corpus)[0].stat().st_mode & 0o777 == 0o640
    assert len(parts_of(made)) == len(parts_of(corpus)) > 9
    assert all(part.samefile(corpus.path / part.name) for part in parts_of(made))
    files = bytes_of(made)
    discard(made)
    verify(corpus)
    monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere"))  # an error of the system
    copied = stage.fn(params, corpus)
    assert bytes_of(copied) == files
    discard(corpus)
    assert texts_of(copied) == toy_texts


def test_what_is_written_in_place_of_a_linked_part_leaves_the_other_name_alone(store, tmp_path: Path, toy_texts):
    corpus = corpus_of(tmp_path, toy_texts)
    link(part := parts_of(corpus)[0], out := tmp_path / "part.parquet")
    assert out.samefile(part)
    with writer(out) as file:
        file.write_table(next(tables(part)).slice(0, 1))
    verify(corpus)
