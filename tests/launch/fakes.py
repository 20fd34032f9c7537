"""A cloud on this machine: a gcloud that notes its calls and really runs what it is to run.

Each host is a folder, the home folder of the commands that `gcloud ... ssh` runs there by bash, as
the shell of a host does. Their `python3 -m uv` makes an environment whose Python notes its
arguments and ends with the statuses that the test has put down.
"""

import json
import os
import pathlib
import shlex
import stat
import subprocess
import sys

# A path with a space cannot follow #!, so sh starts Python with this file. To Python, the lines for
# sh are a string.
_HEAD = f"""#!/bin/sh
''':'
exec {shlex.quote(sys.executable)} -IS "$0" "$@"
'''
import json, os, pathlib, shutil, subprocess, sys, time
"""
_GCLOUD = (
    _HEAD
    + r"""
cloud = pathlib.Path(os.environ["CLOUD"])
argv = sys.argv[1:]
with open(cloud / "calls.jsonl", "a") as file:
    file.write(json.dumps(argv) + "\n")
if len((cloud / "calls.jsonl").read_text().splitlines()) == int(os.environ.get("FAILS", 0)):
    sys.exit(7)
options = dict(item.split("=", 1) for item in argv if item.startswith("--") and "=" in item)
hosts = sorted(path for path in cloud.glob("host*"))
if options.get("--worker") == "0":
    hosts = hosts[:1]
if "describe" in argv:
    states = (cloud / "states").read_text().split()
    (cloud / "states").write_text("\n".join(states[1:]))
    print(states[0])
elif "scp" in argv:
    name, target = argv[argv.index("scp") + 1], argv[argv.index("scp") + 2]
    assert target.endswith(":")
    for host in hosts:
        shutil.copy(name, host / name)
elif "ssh" in argv:
    for host in hosts:
        # As gcloud and ssh pass a command on.
        text = " ".join(options["--command"].split(" "))
        status = subprocess.run(
            ["bash", "-c", text], cwd=host, env={**os.environ, "HOME": str(host)}
        ).returncode
        if status:
            sys.exit(status)
"""
)
_PYTHON3 = (
    _HEAD
    + r"""
if "venv" in sys.argv:
    python = pathlib.Path(sys.argv[-1], "bin", "python")
    python.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(pathlib.Path(os.environ["CLOUD"], "bin", "train"), python)
"""
)
_TRAIN = (
    _HEAD
    + r"""
home = pathlib.Path(os.environ["HOME"])
with open(home / "argv.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
print("training", flush=True)
if (home / "waits").exists():
    while not (home / "goes_on").exists():
        time.sleep(0.02)
statuses = (home / "statuses").read_text().split() if (home / "statuses").exists() else ["0"]
(home / "statuses").write_text(" ".join(statuses[1:] or ["0"]))
sys.exit(int(statuses[0]))
"""
)
_DOCKER = (
    _HEAD
    + r"""
with open(pathlib.Path(os.environ["HOME"], "docker.jsonl"), "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
"""
)
_SUDO = '#!/bin/bash\nexec "$@"\n'
_SLEEP = "#!/bin/bash\nexec /bin/sleep 0.1\n"


def checkout(folder: pathlib.Path) -> pathlib.Path:
    """Makes a git checkout of one file; returns the path at which `tpu_vm` would lie in it."""
    for arguments in (["init"], ["add", "."], ["commit", "-m", "x"]):
        (folder / "code.py").write_text("1\n")
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            cwd=folder,
            check=True,
            capture_output=True,
        )
    return folder / "lamb_tpu" / "launch" / "tpu_vm.py"


class Cloud:
    """A folder of hosts, with programs to be found before others.

    Args:
      folder: folder to be made.
      hosts: number of hosts.
    """

    def __init__(self, folder: pathlib.Path, hosts: int = 1) -> None:
        self.folder = folder
        self.hosts = [folder / f"host{number}" for number in range(hosts)]
        for host in self.hosts:
            host.mkdir(parents=True)
        self.write_program("gcloud", _GCLOUD)
        self.write_program("python3", _PYTHON3)
        self.write_program("train", _TRAIN)
        self.write_program("docker", _DOCKER)
        self.write_program("sudo", _SUDO)
        self.write_program("sleep", _SLEEP)
        self.environment = {
            "CLOUD": str(folder),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }

    def write_program(self, name: str, text: str) -> None:
        """Puts a program into the folder that is searched first."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[list[str]]:
        """The arguments of each call of gcloud."""
        return read(self.folder / "calls.jsonl")

    def trained(self, host: int = 0) -> list[list[str]]:
        """The arguments of each start of training on a host, behind those of Python."""
        starts = read(self.hosts[host] / "argv.jsonl")
        assert all(start[:3] == ["-u", "-m", "lamb_tpu.train"] for start in starts)
        return [start[3:] for start in starts]


def read(path: pathlib.Path) -> list[list[str]]:
    """The lines of a file of lists."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
