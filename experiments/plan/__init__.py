"""Plans of published runs, and the network constants that are fitted to these runs."""
