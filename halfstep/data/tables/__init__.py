"""Tables: CSV files with typed columns, as tensors that a network takes."""
