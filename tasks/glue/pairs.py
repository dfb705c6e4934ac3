"""Minimal pairs: sets of sentences of which one is good and one is bad, such as BLiMP, from files or the hub.

A pair is a row with two sentences. Rows may name a group, such as the grammatical phenomenon, and a field of groups.
"""

import functools
import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from model.errors import InputError, Unreachable
from model.wording import counted
from tasks.corpus import hub
from tasks.corpus.columns import choose, shown_name, value_at
from tasks.corpus.containers import Encoding
from tasks.corpus.kinds import ROWS, ending, layers, reason_to_skip
from tasks.corpus.local import files_below
from tasks.corpus.rows import gather, records
from tasks.glue.data import hub_problem
from tasks.glue.own import FILE
from tasks.store.manifests import known_digest
from tasks.text.tokenizer import WORD

if TYPE_CHECKING:
    import pandas as pd

BLIMP = "BLiMP"  # Warstadt et al. 2020 (TACL 8): 67 paradigms of 1,000 pairs
HUB_BLIMP = hub.Source(
    "nyu-mll/blimp", "877fba0801ffb7cbd8c39c1ff314a46f053f6036", "",
    instead="set minimal_pairs.data to a local file or folder with the pairs (see tasks/README.md, 'Minimal pairs')",
)  # fmt: skip
BLIMP_DIGEST = "c21ea7ed41ce5744e222ac9d9e6381518a27dc5b307263fa0c8cb1d583922cd2"  # of all pairs, by `digest_of`
FILTERED = "blimp_filtered.txt"  # beside this file: the rows of BLiMP that BabyLM leaves out
USUAL = {  # names of columns, in small letters; those of BLiMP first
    "good": ("sentence_good", "good", "good_sentence", "grammatical", "acceptable", "sen"),
    "bad": ("sentence_bad", "bad", "bad_sentence", "ungrammatical", "unacceptable", "wrong_sen"),
    "group": ("uid", "group", "paradigm", "phenomenon"),
    "field": ("field",),
}
SIDES = ("good", "bad")
OPTIONAL = ("group", "field")
FIELDS = "minimal_pairs.data (or decontaminate.pairs)"  # of a recipe, that name sets
LARGEST_SHARE = 0.01  # of pairs with a fault, from which on a warning is logged
log = logging.getLogger(__name__)


class PairSet(BaseModel, frozen=True, extra="forbid"):
    """A set of minimal pairs, and the columns of its files."""

    data: str
    good: str = ""
    bad: str = ""
    group: str = ""
    field: str = ""
    encoding: Encoding = ""

    def identity(self) -> dict:
        """Digests of local files by name, or the hub's revision, in place of the data's location."""
        columns = self.model_dump(include={*USUAL, "encoding"}, exclude_defaults=True)
        return columns | {"data": identity_of_files(self.data)}

    def identity_of_sentences(self) -> dict:
        """The same without the names of groups and fields."""
        return {name: value for name, value in self.identity().items() if name not in OPTIONAL}


def is_local(data: str) -> bool:
    """Whether the pairs are in a local file or folder. Raises InputError if they should be, and nothing is there."""
    if data and Path(data).expanduser().exists():  # "" would be the current folder
        return True
    if FILE.fullmatch(data) or data.count("/") == 0:
        raise InputError(
            f"There is no file or folder {shown_name(data)}. Correct {FIELDS}, or name a data set of the hub, such as "
            f"{HUB_BLIMP.repository}."
        )
    return False


def source_of(data: str) -> hub.Source:
    """The data set of the hub, by OWNER/NAME or OWNER/NAME/FOLDER."""
    owner, name, *_ = data.split("/")
    repository = f"{owner}/{name}"
    if repository == HUB_BLIMP.repository:
        return HUB_BLIMP
    return hub.Source(repository, "", "", instead=HUB_BLIMP.instead)


def identity_of_files(data: str) -> dict:
    """What identifies the pairs in a key, wherever they are."""
    if is_local(data):
        return {name: known_digest(path) for name, path in files_of(data).items()}
    return {"hub": data, "revision": hub.commit(source_of(data))}


def files_of(data: str) -> dict[str, Path]:
    """The files with the pairs by their names, in order; those of the hub are fetched.

    Raises InputError if there are none, Unreachable if the hub can't be reached.
    """
    folder = Path(data).expanduser() if is_local(data) else fetch(data)
    if folder.is_file():
        return {folder.name: folder}
    found = {}
    for path in files_below(folder, hidden=False):
        name = path.relative_to(folder).as_posix()
        if ending(name) in ROWS and not reason_to_skip(name, extract=""):
            found[name] = path
    if not found:
        raise InputError(
            f"{data} has no file with minimal pairs. Expected files that end in {', '.join(ROWS)}; correct {FIELDS}."
        )
    return found


@functools.cache
def fetch(data: str) -> Path:
    """The folder of a data set of the hub in the cache of the hub's client, with all its files of rows.

    Raises Unreachable if the hub can't be reached and the data set isn't in the cache.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    source = source_of(data)
    below = data.removeprefix(source.repository).strip("/")
    start = f"{below}/*" if below else "*"
    patterns = [f"{start}{suffix}" for suffix in ROWS]
    problem = hub_problem(source)  # the client would retry for 30 s
    if problem:
        with suppress(LocalEntryNotFoundError):
            return snapshot(source, patterns, is_cached=True) / below
        raise Unreachable(problem)
    with hub.asking(source.repository, source.instead):
        return snapshot(source, patterns, is_cached=False) / below


def snapshot(source: hub.Source, patterns: list[str], is_cached: bool) -> Path:
    """The folder of a data set, from the hub or from the cache of its client alone."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        source.repository,
        repo_type="dataset",
        revision=hub.commit(source),
        allow_patterns=patterns,
        local_files_only=is_cached,
    )
    return Path(folder)


def read(pairs: PairSet) -> "pd.DataFrame":
    """The pairs, sorted by group: group, field, row (its number in the group, from 0), good, bad.

    Raises InputError for files without pairs, and for rows without a sentence.
    """
    return _read(pairs, str(pairs.identity()))


@functools.lru_cache(maxsize=4)
def _read(pairs: PairSet, _identity: str) -> "pd.DataFrame":
    import pandas as pd

    files = files_of(pairs.data)
    tables = []
    for name, path in files.items():
        tables.append(read_file(pairs, path, name))
    table = pd.concat(tables, ignore_index=True).sort_values("group", kind="stable", ignore_index=True)
    table.insert(2, "row", table.groupby("group").cumcount())
    warn_of_repeated(table, name_of(pairs.data))
    if pairs.data == HUB_BLIMP.repository and digest_of(table) != BLIMP_DIGEST:
        raise InputError(
            f"{pairs.data} has {len(table):,} pairs of {table['group'].nunique()} paradigms here; expected the 67,000 "
            f"of 67 at {HUB_BLIMP.revision[:12]}. Delete it from the cache of the hub's client, and run again; or "
            f"{HUB_BLIMP.instead}."
        )
    return table


def warn_of_repeated(table: "pd.DataFrame", name: str) -> None:
    """Log a warning of sentences that are good and bad at once, and of pairs that a group has several times."""
    same = int((table["good"] == table["bad"]).sum())
    if same > LARGEST_SHARE * len(table):
        log.warning(
            "In %s of %s in %s both sentences are the same, so the pair is a tie.",
            f"{same:,}", counted(len(table), "pair"), name,
        )  # fmt: skip
    again = int(table.duplicated(["group", *SIDES]).sum())
    if again > LARGEST_SHARE * len(table):
        log.warning(
            "%s of %s in %s repeat another one of their group, so standard errors are too small.",
            f"{again:,}", counted(len(table), "pair"), name,
        )  # fmt: skip


def read_file(pairs: PairSet, path: Path, where: str) -> "pd.DataFrame":
    """The pairs of a file. `where`: its name in the set."""
    import pandas as pd

    numbers, rows = gather(records(path, where, pairs.encoding), where, "row", ", or set minimal_pairs.encoding")
    if not rows:
        raise InputError(f"{where} has no rows. Expected minimal pairs; correct {FIELDS}.")
    chosen = choose_columns(pairs, rows, where)
    columns: dict[str, list] = {"group": [group_of(where)] * len(rows), "field": [""] * len(rows)}
    for name, column in chosen.items():
        columns[name] = [text_of(row, name, column, where, number) for number, row in zip(numbers, rows, strict=True)]
    return pd.DataFrame(columns)


def group_of(name: str) -> str:
    """The group of rows that name none: the folder of their file in the set, or else the file without its suffixes."""
    folder = Path(name).parent.as_posix()
    return stem_of(name) if folder == "." else folder


def stem_of(name: str) -> str:
    """The name of a file without the suffixes of its format and compression."""
    whole = Path(name).name
    if ending(whole) not in ROWS:
        return whole
    return Path(layers(whole).name).stem


def choose_columns(pairs: PairSet, rows: list[dict], where: str) -> dict[str, str]:
    """The columns with the sentences, and those with group and field if there are any."""
    chosen = {}
    for name, usual in USUAL.items():
        asked = getattr(pairs, name)
        is_optional = name in OPTIONAL and not asked
        column = choose(rows, asked, usual, where, f"Set minimal_pairs.{name} to the right one.", is_optional)
        if column:
            chosen[name] = column
    if chosen["good"] == chosen["bad"]:
        raise InputError(
            f"{where}: the good and the bad sentence are both to be in column {shown_name(chosen['good'])}. Set "
            "minimal_pairs.good and minimal_pairs.bad to two columns."
        )
    return chosen


def text_of(row: dict, name: str, column: str, where: str, number: int) -> str:
    """The text in a column, which is the one for `name` of USUAL. Raises InputError if there is none."""
    value = value_at(row, column)
    if name in OPTIONAL and type(value) is int:  # the number of a group
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        found = "nothing" if not isinstance(value, (int, float)) else repr(value)
        raise InputError(f"{where}: row {number:,} has {found} in column {column}; expected text. Correct it.")
    return value.strip() if name in OPTIONAL else value


def name_of(data: str) -> str:
    """What reports call a set: BLiMP, or the name of its file, folder or data set."""
    if data.strip("/") == HUB_BLIMP.repository:
        return BLIMP
    return stem_of(os.path.abspath(Path(data).expanduser()))  # such as that of the current folder, if it is "."


def each_name_once(found: Iterable[PairSet], taken: Collection[str]) -> list[PairSet]:
    """The sets, each name once, with the columns of its last mention.

    Raises InputError for a set with a name that is taken, for two sets of one name, and for other sentences of one set.
    """
    by_name: dict[str, PairSet] = {}
    for one in found:
        name = name_of(one.data)
        if name in taken:
            raise InputError(
                f"{one.data} are minimal pairs of the name {name}, which tables have for something else. Give the file "
                "another name, or copy the data set to a file."
            )
        other = by_name.get(name)
        if other and not are_same_sentences(one, other):
            raise InputError(
                f"{other.data} and {one.data} are minimal pairs of one name, but not the same ones. Rename a file, or "
                "name the same columns of both."
            )
        by_name[name] = one
    return list(by_name.values())


def are_same_sentences(one: PairSet, other: PairSet) -> bool:
    """Whether two sets are the same columns of the same data."""
    of_one, of_other = (each.model_dump(exclude={"data", *OPTIONAL}) for each in (one, other))
    return of_one == of_other and place_of(one.data) == place_of(other.data)


def place_of(data: str) -> str:
    """Where the data are: an absolute path, or the name on the hub."""
    path = Path(data).expanduser()
    return os.path.abspath(path) if path.exists() else data.rstrip("/")


@functools.cache  # the answer enters a key, so it must stay the same throughout a run
def at_hand(pairs: PairSet) -> bool:
    """Whether the pairs can be read now; the log says why a data set of the hub can't."""
    try:
        read(pairs)
    except Unreachable as error:
        log.warning("The sentences of %s are not searched for. %s", name_of(pairs.data), error)
        return False
    return True


def digest_of(table: "pd.DataFrame") -> str:
    """SHA-256 of all pairs in the order of `read`."""
    digest = hashlib.sha256()
    for group, good, bad in zip(table["group"], table["good"], table["bad"], strict=True):
        digest.update(f"{group}\t{good}\t{bad}\n".encode())
    return digest.hexdigest()


# What is known of pairs


def filtered_by_babylm(table: "pd.DataFrame") -> np.ndarray | None:
    """(pairs,) whether each pair is in blimp_filtered of the BabyLM challenge; None unless the set is BLiMP."""
    if digest_of(table) != BLIMP_DIGEST:
        return None
    left_out = dict(rows_left_out())
    is_out = [row in left_out[group] for group, row in zip(table["group"], table["row"], strict=True)]
    return ~np.array(is_out)


def rows_left_out() -> Iterator[tuple[str, set[int]]]:
    """The paradigms of BLiMP, each with the numbers of the rows that blimp_filtered leaves out."""
    text = resources.files(__package__).joinpath(FILTERED).read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            group, *rows = line.split()
            yield group, {int(row) for row in rows}


def are_permutations(table: "pd.DataFrame") -> np.ndarray:
    """(pairs,) whether the two sentences of each have the same words, in another order."""
    same = []
    for good, bad in zip(table["good"], table["bad"], strict=True):
        words_of_good = words_of(good)
        words_of_bad = words_of(bad)
        same.append(words_of_good != words_of_bad and sorted(words_of_good) == sorted(words_of_bad))
    return np.array(same)


def words_of(sentence: str) -> list[str]:
    """The words of a sentence, in order, without capitals and punctuation."""
    found = WORD.findall(sentence.lower())
    return [word for word in found if any(map(str.isalnum, word))]


def draw(table: "pd.DataFrame", most: int) -> "pd.DataFrame":
    """At most so many pairs of each group, drawn in the same way each time; 0: all of them."""
    if not most:
        return table
    kept = []
    for rows in table.groupby("group", sort=False).indices.values():
        order = np.random.default_rng(0).permutation(len(rows))
        kept.append(np.sort(rows[order[:most]]))
    return table.iloc[np.sort(np.concatenate(kept))].reset_index(drop=True)
