"""Runs and data in stores: S3, and whatever else fsspec has a file system for."""
