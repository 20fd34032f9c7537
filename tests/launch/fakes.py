"""A simulated cloud: a fake gcloud that records its calls and runs the commands for hosts.

Each host is a folder. `gcloud ... ssh` runs commands with bash in that folder, which is also the home
folder. `python3 -m uv` creates an environment whose Python records its arguments and exits with the
statuses that the test has set.
"""

import json
import os
import pathlib
import shlex
import stat
import subprocess
import sys

# #! does not support a path with a space, so sh runs this file with Python. To Python, the lines for
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
if argv[:2] in (["compute", "ssh"], ["compute", "scp"]):  # one instance, by its name
    words = [item for item in argv[2:] if not item.startswith("--")]
    name = words[-1].partition(":")[0]
    hosts = [host for host in hosts if host.name == name] or hosts
if "list-instances" in argv:
    print("\n".join(host.name for host in hosts[::-1]))
elif argv[:2] == ["projects", "describe"]:
    print("1234567")
elif "describe" in argv:
    states = (cloud / "states").read_text().split()
    (cloud / "states").write_text("\n".join(states[1:]))
    print(states[0])
elif "scp" in argv:
    name, target = [item for item in argv[argv.index("scp") + 1 :] if not item.startswith("--")]
    for host in hosts:
        shutil.copy(name, host / (target.partition(":")[2] or name))
elif "ssh" in argv:
    for host in hosts:
        # gcloud and ssh pass a command on in this way.
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
names = ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
variables = {name: os.environ[name] for name in names if name in os.environ}
(home / "variables.json").write_text(json.dumps(variables))
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
here = "build" in sys.argv or "push" in sys.argv  # on this machine, not on a host
with open(pathlib.Path(os.environ["CLOUD" if here else "HOME"], "docker.jsonl"), "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
if "build" in sys.argv:  # unpack the files, which come as a tar on stdin
    context = pathlib.Path(os.environ["CLOUD"], "context")
    context.mkdir()
    sys.exit(subprocess.run(["tar", "-xf", "-", "-C", context]).returncode)
"""
)
# Only records its calls.
_KUBECTL = (
    _HEAD
    + r"""
cloud = pathlib.Path(os.environ["CLOUD"])
with open(cloud / "kubectl.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
"""
)
# Stands in for uv's installer, which `curl ... | sh` runs.
_CURL = """#!/bin/bash
echo 'mkdir -p ~/.local/bin && cp "$CLOUD/bin/python3" ~/.local/bin/uv'
"""
_HOSTNAME = '#!/bin/bash\nbasename "$HOME"\n'
_SUDO = '#!/bin/bash\nexec "$@"\n'
_SLEEP = "#!/bin/bash\nexec /bin/sleep 0.1\n"


def checkout(folder: pathlib.Path) -> pathlib.Path:
    """Creates a git checkout with one file; returns the path of `local_steps` in it."""
    for arguments in (["init"], ["add", "."], ["commit", "-m", "x"]):
        (folder / "code.py").write_text("1\n")
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            cwd=folder,
            check=True,
            capture_output=True,
        )
    return folder / "lamb_tpu" / "launch" / "local_steps.py"


class Cloud:
    """A folder of hosts, with fake programs that come first in PATH.

    Args:
      folder: folder to create.
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
        self.write_program("kubectl", _KUBECTL)
        self.write_program("sudo", _SUDO)
        self.write_program("curl", _CURL)
        self.write_program("hostname", _HOSTNAME)
        self.write_program("sleep", _SLEEP)
        self.environment = {
            "CLOUD": str(folder),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }

    def write_program(self, name: str, text: str) -> None:
        """Writes a program to the folder that comes first in PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[list[str]]:
        return read(self.folder / "calls.jsonl")

    def called(self, program: str) -> list[list[str]]:
        return read(self.folder / f"{program}.jsonl")

    def trained(self, host: int = 0) -> list[list[str]]:
        """Returns the arguments of each start of training on a host, without those of Python."""
        starts = read(self.hosts[host] / "argv.jsonl")
        assert all(start[:3] == ["-u", "-m", "lamb_tpu.train"] for start in starts)
        return [start[3:] for start in starts]


def read(path: pathlib.Path) -> list[list[str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
