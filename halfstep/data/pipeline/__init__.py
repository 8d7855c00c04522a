"""Pipelines: sources, stages that order items, maps that change them, ways to deliver batches."""
