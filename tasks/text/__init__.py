"""Algorithms on text: words, n-grams, MinHash, repeated substrings; none of them knows a stage."""
