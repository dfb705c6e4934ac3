"""Sorted runs on disk, against plain sorting in memory."""

import errno
from pathlib import Path

import numpy as np
import pytest

from tasks.text import sorted_runs


@pytest.mark.parametrize("spread", [1, 3, 1000, 2**20, 2**44, 2**64])
@pytest.mark.parametrize("close", [sorted_runs.CLOSE, 10**9, 3])
def test_ascending_is_a_stable_sort_also_of_keys_that_differ_in_few_bits(monkeypatch, spread: int, close: int):
    monkeypatch.setattr(sorted_runs, "CLOSE", close)
    for count in (0, 1, 2, 3000):
        rng = np.random.default_rng(count)
        lowest = rng.integers(0, 5, count, dtype=np.uint64)
        upper = rng.integers(0, 40, count, dtype=np.uint64) << np.uint64(58)
        for keys in (rng.integers(0, spread, count, dtype=np.uint64), upper + lowest):
            assert np.array_equal(sorted_runs.ascending(keys), np.argsort(keys, kind="stable"))


def test_an_address_is_a_part_and_a_place_and_sorts_by_both():
    parts, places = np.array([0, 3, 3, 7000]), np.array([9, 0, 2**39, 5])
    addresses = sorted_runs.address(parts, places)
    assert np.array_equal(sorted_runs.part_of(addresses), parts)
    assert np.array_equal(sorted_runs.place_of(addresses), places)
    mixed = np.random.default_rng(1).permutation(np.tile(addresses, 3))
    assert np.array_equal(mixed[sorted_runs.by_address(mixed)], np.repeat(addresses, 3))
    assert sorted_runs.part_numbers(mixed).tolist() == [0, 3, 7000]


def test_the_ranges_of_runs_are_all_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sorted_runs, "ENTRIES", 100)
    rng, written = np.random.default_rng(2), []
    for i, size in enumerate((0, 700, 1, 299)):
        keys = np.sort(rng.integers(0, 2**64, size, dtype=np.uint64))
        keys[-1:], keys[:1] = 2**64 - 1, 0
        values = np.arange(size) + 1000 * i
        sorted_runs.save_run(tmp_path / f"r{i}", keys, values)
        written += zip(keys.tolist(), values.tolist(), strict=True)
    ranges, found = sorted_runs.ranges(1000), []
    assert len(ranges) == 10
    for low, high in ranges:
        keys, values = sorted_runs.load_range(sorted_runs.runs_in(tmp_path, "r*"), low, high)
        assert ((keys >= low) & (keys <= high - 1)).all()
        assert len(keys) < 200
        found += zip(keys.tolist(), values.tolist(), strict=True)
    assert sorted(found) == sorted(written)
    assert [len(array) for array in sorted_runs.load_range([], 0, 10, arrays=3)] == [0, 0, 0]


def test_equal_keys_are_grouped_with_the_address_of_the_first():
    grouped = sorted_runs.group(np.array([7, 4, 7, 5, 4, 7]), np.arange(10, 16))
    addresses, firsts = [11, 14, 13, 10, 12, 15], [11, 11, 13, 10, 10, 10]
    assert [array.tolist() for array in grouped] == [[4, 4, 5, 7, 7, 7], addresses, firsts]
    assert [len(array) for array in sorted_runs.group(np.zeros(0), np.zeros(0))] == [0, 0, 0]


def test_a_full_disk_is_an_error_that_says_so():
    with pytest.raises(OSError, match="No space left") as refused:
        sorted_runs.save(Path("/dev/full"), np.zeros(10**6))
    assert refused.value.errno == errno.ENOSPC


def test_runs_are_in_the_order_of_their_numbers(tmp_path: Path):
    for name in ("part-99999", "part-100000", "part-00002"):
        sorted_runs.save_run(tmp_path / name, np.arange(3), np.arange(3))
    assert [run.name for run in sorted_runs.runs_in(tmp_path, "part-*")] == ["part-00002", "part-99999", "part-100000"]
