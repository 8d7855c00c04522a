"""From settings to data, network, model and run folder: what every command is built on."""
