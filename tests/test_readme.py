"""What the README tells a newcomer is true."""

import re

from tests import tiny
from tests.shared import ROOT

README = (ROOT / "README.md").read_text()


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_first_python_block_prints_its_own_lines_only():
    """Also where libtpu is installed, as by `make setup`, and there is no TPU."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    done = tiny.python(block)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("path ")


def test_the_two_commands_stand_first():
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo: setup" in makefile and "\ntest: setup" in makefile


def test_files_it_links_to_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_configs_in_its_commands_exist():
    configs = re.findall(r"--config=([\w/]+\.py)", README)
    assert configs
    for config in configs:
        assert (ROOT / config).is_file(), config
