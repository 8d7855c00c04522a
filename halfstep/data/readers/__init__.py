"""Readers of files: strict about every byte, bounded in memory, never unpickling."""
