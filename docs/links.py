"""Checks every link within the built site, including links to anchors: python docs/links.py site/docs

Sphinx checks references while it reads the sources. This check also covers raw HTML, the rendered
notebooks and the menus. Sphinx's `linkcheck` checks links to other sites.
"""

import html.parser
import pathlib
import sys
import urllib.parse


class _Page(html.parser.HTMLParser):
    """The anchors and the links of a page.

    Attributes:
      anchors: values of the attribute `id` of any tag, and of the attribute `name` of <a>.
      links: values of the attributes `href` and `src`.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.links.append(value)


def broken(site: pathlib.Path) -> list[str]:
    """Returns a line for each link to a file or an anchor that the site lacks."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            address = urllib.parse.urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(address.path)).resolve()
            if not address.path:
                target = path
            elif target.is_dir():
                target /= "index.html"
            anchor = urllib.parse.unquote(address.fragment)
            if not target.is_file():
                found.append(f"{path.relative_to(site)}: no file {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{path.relative_to(site)}: no anchor {link}")
    return found


def main(folder: str) -> int:
    """Prints the broken links of a site, and returns the exit status: 1 if there are any."""
    found = broken(pathlib.Path(folder).resolve())
    print("\n".join(found) or "the site has no broken links")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
