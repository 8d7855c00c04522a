"""Getting data sets: what is known by name, where it may lie, downloads, archives."""
