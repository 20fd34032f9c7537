"""Plans of published runs, and the constants of the network that these runs give."""
