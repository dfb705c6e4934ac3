"""Corpora: reading text from files and the hub; the Parquet parts that stages read and write."""
