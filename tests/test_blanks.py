"""Blanks: which sentences and words of held-out text are chosen, and the words that a model expects there."""

import itertools

import pytest
import torch
from conftest import SUBJECTS
from toys import MODERN, SMALL, rough_bert, tokenizer_in

from model import export
from model.errors import InputError
from tasks.reports import blanks
from tasks.text.tokenizer import load_tokenizer, specials_of

LENGTH = 64
TEXTS = [
    "The old harbour was described twice before the rain. Nobody forgot the broken lamp by noon today.",
    "A letter came from the committee in the morning. It was read aloud to the people of the town.",
    "x = f(a)[0] + g(b)\nprint(x)",
    "12, 13, 14, 15, 16, 17, 18, 19, 20, 21.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a vocabulary that has every letter and few words."""
    path = tmp_path_factory.mktemp("model")
    entries = tokenizer_in(path, LENGTH)
    export.save(rough_bert(SMALL.model_copy(update=MODERN), entries, LENGTH), path)
    return path


@pytest.fixture(autouse=True)
def _words_in_many_pieces(monkeypatch):
    monkeypatch.setattr(blanks, "MOST_PIECES", 9)  # the toy vocabulary has few words


def test_sentences_and_words_depend_on_the_text_alone(folder):
    tokenizer = load_tokenizer(folder)
    chosen = blanks.choose(TEXTS, tokenizer, LENGTH)
    assert blanks.choose([*reversed(TEXTS), TEXTS[0]], tokenizer, LENGTH) == chosen
    sentences = [hidden.sentence for hidden in chosen]
    assert len(set(sentences)) == len(sentences) == 4, "the sentences of prose, and neither code nor numbers"
    documents = [next(text for text in TEXTS if sentence in text) for sentence in sentences]
    assert set(documents[:2]) == set(TEXTS[:2]), "one of each document first"
    for hidden in chosen:
        word = hidden.sentence[hidden.begin : hidden.end]
        assert len(word) >= blanks.FEWEST_LETTERS
        assert word.isalpha()
        assert hidden.sentence.split().count(word) == 1
        assert hidden.begin > 0


def test_a_word_that_the_vocabulary_has_whole_is_preferred(folder):
    known = SUBJECTS[0].split()[-1]
    [hidden] = blanks.choose([f"Qwxzzk vbnmqq {known} plokij uhbygv tfcrdx."], load_tokenizer(folder), LENGTH)
    assert hidden.sentence[hidden.begin : hidden.end] == known
    assert hidden.pieces == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Це речення має досить слів, щоб сховати одне. А це вже друге речення того самого тексту.", 2),
        ("هذه الجملة طويلة بما يكفي لإخفاء كلمة واحدة منها؟ وهذه جملة ثانية في النص نفسه أيضا۔", 2),
        (
            "この文には隠すことができる漢字の言葉が含まれています。次の文も同じ長さで書かれていますから大丈夫。",
            2,
        ),
        ("यह वाक्य इतना लंबा है कि इसमें एक शब्द छिपाया जा सकता है। यह दूसरा वाक्य भी काफी लंबा है।", 2),
        ("short. Too short.", 0),
    ],
)
def test_sentences_of_any_script_are_divided(text, count):
    found = [sentence for sentence in blanks.whole_sentences(text) if blanks.is_prose(sentence)]
    assert len(found) == count


def test_text_without_full_stops_is_divided_into_lines(folder):
    lines = "the committee of the old harbour described\nevery broken lamp twice before the rain came"
    chosen = blanks.choose([lines], load_tokenizer(folder), LENGTH)
    assert {hidden.sentence for hidden in chosen} <= set(lines.splitlines())


def test_probabilities_are_those_of_all_words_of_as_many_pieces(folder):
    bert = export.load(folder).eval()
    tokenizer = load_tokenizer(folder)
    specials = specials_of(tokenizer)
    entries = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    usual = [number for number in range(len(entries)) if number not in specials]
    begins = [number for number in usual if not entries[number].startswith("##")]
    continues = [number for number in usual if entries[number].startswith("##")]
    ids = torch.tensor([specials.cls, begins[3], specials.mask, specials.mask, begins[5], specials.sep])
    places = torch.tensor([2, 3])
    kinds = blanks.kinds_of_entries(tokenizer, specials)

    def share(pair: tuple[int, int]) -> float:
        with torch.inference_mode():
            first = bert.logits(bert.encode(ids[None]))[0, 2].softmax(-1)[pair[0]]
            filled = ids.clone()
            filled[2] = pair[0]
            return float(first * bert.logits(bert.encode(filled[None]))[0, 3].softmax(-1)[pair[1]])

    found = blanks.most_likely(bert, ids, places, kinds)
    assert all(pair[0] in begins and pair[1] in continues for pair, _ in found)
    for pair, log_share in found[:3]:
        assert float(torch.tensor(log_share).exp()) == pytest.approx(share(pair), rel=1e-3)
    best = max(itertools.product([pair[0] for pair, _ in found], continues[:40]), key=share)
    assert share(tuple(found[0][0])) >= share(best) * 0.999


def test_a_blank_is_right_if_its_word_is_the_first_guess(folder):
    found = blanks.fill_blanks(folder, TEXTS)
    assert blanks.fill_blanks(folder, TEXTS) == found
    assert len(found) == 4
    for blank in found:
        first = blank["guesses"][0]
        assert blank["before"] + blank["word"] + blank["after"] in " ".join(TEXTS)
        assert blank["right"] == (first["word"] == blank["word"].lower())
        shares = [guess["probability"] for guess in blank["guesses"]]
        assert shares == sorted(shares, reverse=True)
        assert first["probability"] >= blank["probability"] or blank["pieces"] > 1
        assert f"`{blanks.GAP}`" in blanks.with_gap(blank)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        blanks.fill_blanks(tmp_path, TEXTS)
