"""Pages of what was measured: Markdown for the repository, and a site of HTML files."""
