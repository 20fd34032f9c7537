"""Pages of the results: Markdown for the repository, and an HTML site."""
