"""Tar shards in the manner of WebDataset: members of one key are a sample."""
