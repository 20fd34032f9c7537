"""Tests claims of the README and the package pages: commands, flags, links and recipes."""

import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from lamb_tpu import command
from tests import tiny
from tests.shared import ROOT

README = (ROOT / "README.md").read_text()
# Pages with commands for users. experiments/ has its own test.
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "configs" / "README.md",
        ROOT / "experiments" / "README.md",
        *(ROOT / "lamb_tpu").glob("*/*.md"),
    ]
)


def commands(page: str) -> list[list[str]]:
    """Returns the commands of a page's shell blocks: [module, argument, ...].

    A command is `python -m MODULE ...` or `lamb_tpu NAME ...`.
    """
    actual = []
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"python -m (lamb_tpu\S*|experiments\S*)([^;]*)", line)
            match = match or re.match(r"lamb_tpu (\w+)([^;]*)", line)
            if match:
                module = match[1] if "." in match[1] else f"lamb_tpu.{match[1]}"
                actual.append([module, *shlex.split(match[2], comments=True)])
    return actual


def module_file(module: str) -> pathlib.Path:
    module = command.MODULES.get(module.removeprefix("lamb_tpu."), module)
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None and spec.origin is not None, module
    return pathlib.Path(spec.origin)


def source_of(module: str) -> str:
    """Returns the source of a command, and of its options if they are in another file."""
    path = module_file(module)
    options = path.with_name("options.py")
    return path.read_text() + (options.read_text() if options.exists() else "")


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_first_python_block_prints_only_its_lines():
    """stderr stays empty even if libtpu is installed (as by `make setup`) on a machine without a TPU."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    done = tiny.python(block)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("path ")


def test_the_two_commands_stand_first():
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo: setup" in makefile and "\ntest: setup" in makefile


def test_readme_is_a_page_for_newcomers():
    assert len(README.splitlines()) <= 170


def test_readme_links_to_every_package_page():
    for page in PAGES:
        assert page == "README.md" or f"]({page})" in README, page


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_links_to_exist(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links or page.startswith("lamb_tpu/")
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, link


def test_configs_and_make_targets_on_the_pages_exist():
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    configs = {c for text in texts.values() for c in re.findall(r"--config=([\w/]+\.py)", text)}
    assert len(configs) >= 6
    for config in configs:
        assert (ROOT / config).is_file(), config
    for recipe in re.findall(r"^\| `(\w+\.py)", texts["configs/README.md"], re.MULTILINE):
        assert (ROOT / "configs" / recipe).is_file(), recipe
    makefile = (ROOT / "Makefile").read_text()
    for page, text in texts.items():
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert f"\n{target}: setup" in makefile or f"\n{target}:" in makefile, (page, target)


def test_every_recipe_stands_on_the_page_of_recipes():
    page = (ROOT / "configs" / "README.md").read_text()
    for path in (ROOT / "configs").glob("*.py"):
        assert f"| `{path.name}` |" in page, path.name


def test_flags_of_commands_exist():
    """Checks every flag of every command on a page; flags after -- belong to the program of --module."""
    checked = 0
    cli = (ROOT / "lamb_tpu" / "cli.py").read_text()
    for page in PAGES:
        for module, *arguments in commands(page):
            source = source_of(module) + cli
            started = [
                "lamb_tpu.train",
                *(
                    argument.removeprefix("--module=")
                    for argument in arguments
                    if argument.startswith("--module=")
                ),
            ]
            for argument in arguments:
                if argument == "--":
                    source = source_of(started[-1]) + cli
                    continue
                flag = argument.removeprefix("--").partition("=")[0]
                if flag.startswith("config."):
                    continue  # checked by the next test
                if not argument.startswith("-"):
                    continue  # not a flag
                assert re.search(rf'"(--)?{re.escape(flag)}["=]', source), (page, module, argument)
                checked += 1
    assert checked >= 40


def test_configs_and_overrides_of_commands_are_accepted(tmp_path):
    """Checks every key and value of each command's --config and overrides."""
    photographs = tmp_path / "IMAGES"
    for name in ("cats", "dogs"):
        (photographs / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8)).save(photographs / name / f"{number}.jpg")
    lines = {}
    for page in PAGES:
        for _, *arguments in commands(page):
            chosen = [
                item.replace("dir=IMAGES,weights=FOLDER", f"dir={photographs}")
                for item in arguments
                if item.startswith("--config")
            ]
            # Modules of the pages' examples, such as my_arrays, are in no folder of the checkout.
            is_custom = any(re.search(r"\bmy_\w+:", item) for item in chosen)
            if not is_custom and any(item.startswith("--config=") for item in chosen):
                lines[tuple(chosen)] = page
    assert len(lines) >= 12
    file = tmp_path / "lines.json"
    file.write_text(json.dumps([["tests.print_config", *line, "--print-config"] for line in lines]))
    subprocess.run([sys.executable, "-m", "tests.commands", str(file)], cwd=ROOT, check=True)
    for (line, page), result in zip(lines.items(), json.loads(file.read_text()), strict=True):
        assert result["status"] == 0, (page, line, result["stderr"])
