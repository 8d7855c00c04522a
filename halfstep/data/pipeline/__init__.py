"""Pipelines: sources, stages that order items, maps that change them, and the ways batches come out."""
