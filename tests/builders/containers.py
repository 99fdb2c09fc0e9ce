"""A Docker-compatible engine for the stack tests, and the images that they run.

`DOCKER_HOST`, or a Docker engine that answers, is taken as it is. Where there is none, podman serves Docker's API on a
socket of its own, with its images below `.stack/`, and what elsewhere is pulled is built from Debian packages.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from builders.live import ended, wait_until

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".stack"
IMAGE = "localhost/kv-canary:stack-test"
COMPOSE_FILES = (ROOT / "deploy" / "compose.yaml", ROOT / "tests" / "stack" / "compose.test.yaml")
LOCAL_IMAGES = ROOT / "tests" / "stack" / "local_images.sh"
SUBSTITUTES = ("podman", "buildah", "runc", "debootstrap")
PIP_KEYS = ("index-url", "extra-index-url", "find-links")
STORAGE_CONF = """\
[storage]
driver = "{driver}"
graphroot = "{state}/images"
runroot = "{state}/run"
"""
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
exit_command_delay = 5
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{state}/networks"
"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs `docker` and `docker compose`. `images` is what the compose file takes from the environment."""

    environment: dict[str, str]
    builder: tuple[str, ...]
    images: dict[str, str]

    @property
    def image(self) -> str:
        return self.images["KV_CANARY_IMAGE"]

    def docker(self, *arguments: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return _run(["docker", *arguments], self.environment, check=check, timeout=timeout)

    def build(self, image: str, **arguments: str) -> None:
        """The project's Dockerfile over the working tree."""
        given = [f"--build-arg={name}={value}" for name, value in (_build_arguments() | arguments).items()]
        _run([*self.builder, *given, "-t", image, str(ROOT)], self.environment, timeout=1500)

    def logs(self, container: str) -> str:
        done = self.docker("logs", container)
        return done.stdout + done.stderr

    def compose(self, project: str, variables: dict[str, str], *arguments: str, timeout: float = 120) -> str:
        files = [part for file in COMPOSE_FILES for part in ("-f", str(file))]
        environment = {**self.environment, **self.images, **variables}
        command = [*_compose(self.environment), "--project-name", project, *files, "--profile", "test", *arguments]
        done = _run(command, environment, timeout=timeout)
        return done.stdout + done.stderr


def _compose(environment: dict[str, str]) -> list[str]:
    """The plugin of the docker command if it is there, else the program of old."""
    plugin = _run(["docker", "compose", "version"], environment, check=False, timeout=30)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


def why_no_engine() -> str | None:
    """What is missing for tests with containers; None when they can run."""
    if shutil.which("docker") is None:
        return "the docker command is not installed; make test-stack installs it"
    if _answers(dict(os.environ)):
        return None
    missing = [name for name in SUBSTITUTES if shutil.which(name) is None]
    if missing:
        return f"no Docker engine answers, and for the substitute there is no {', '.join(missing)}"
    return None if os.getuid() == 0 else "no Docker engine answers, and the substitute needs root"


@contextmanager
def container_engine() -> Iterator[Engine]:
    """An engine with the project's image in it, built from the working tree."""
    if _answers(dict(os.environ)):
        engine = Engine(environment=dict(os.environ), builder=("docker", "build"), images={"KV_CANARY_IMAGE": IMAGE})
        engine.build(IMAGE)
        yield engine
        return
    with _substitute() as environment:
        pip = _pip_configuration()
        tag = _local_images(environment, pip)
        mounts = [f"--volume={folder}:{folder}:ro" for folder in _folders_of(pip)]
        builder = ("buildah", "bud", "--isolation=chroot", "--format=docker", "--layers", *mounts)
        images = {
            "KV_CANARY_IMAGE": IMAGE,
            "PROMETHEUS_IMAGE": f"localhost/kv-canary-prometheus:{tag}",
            "ALERTMANAGER_IMAGE": f"localhost/kv-canary-alertmanager:{tag}",
        }
        engine = Engine(environment=environment, builder=builder, images=images)
        engine.build(IMAGE, BASE=f"localhost/kv-canary-python:{tag}")
        yield engine
        _run(["buildah", "rmi", "--prune"], environment)  # what this build replaced


def _answers(environment: dict[str, str]) -> bool:
    return _run(["docker", "version"], environment, check=False, timeout=30).returncode == 0


@contextmanager
def _substitute() -> Iterator[dict[str, str]]:
    STATE.mkdir(exist_ok=True)
    files = {"CONTAINERS_STORAGE_CONF": STATE / "storage.conf", "CONTAINERS_CONF": STATE / "containers.conf"}
    environment = dict(os.environ) | {name: str(file) for name, file in files.items()}
    files["CONTAINERS_CONF"].write_text(CONTAINERS_CONF.format(state=STATE))
    for driver in ("overlay", "vfs"):  # vfs copies every layer: only where the file system cannot do better
        files["CONTAINERS_STORAGE_CONF"].write_text(STORAGE_CONF.format(state=STATE, driver=driver))
        if _run(["podman", "info"], environment, check=driver == "vfs").returncode == 0:
            break
    _run(["podman", "rm", "--all", "--force"], environment)  # what a run left that was killed
    with tempfile.TemporaryDirectory(prefix="kv-canary-") as folder, (STATE / "log").open("wb") as log:
        socket = Path(folder) / "engine"  # not below STATE: the path of a socket must be short
        command = ["podman", "system", "service", "--time=0", f"unix://{socket}"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        with ended(process):
            environment |= {"DOCKER_HOST": f"unix://{socket}"}
            wait_until(lambda: _answers(environment), 30, f"podman serves Docker's API, see {STATE / 'log'}")
            try:
                yield environment
            finally:
                _run(["podman", "rm", "--all", "--force"], environment)
    # podman leaves its folder mounted onto itself, once or more: it could not be removed
    while _run(["umount", "--lazy", str(STATE / "images" / "overlay")], environment, check=False).returncode == 0:
        continue


def _local_images(environment: dict[str, str], pip: dict[str, str]) -> str:
    """Builds what is missing of them; their tag, which changes with what they are made from."""
    configuration = "[global]\n" + "".join(f"{key} = {value}\n" for key, value in pip.items())
    (STATE / "pip.conf").write_text(configuration)
    tag = hashlib.sha256(LOCAL_IMAGES.read_bytes() + configuration.encode()).hexdigest()[:12]
    _run([str(LOCAL_IMAGES), str(STATE), tag], environment, timeout=900)
    return tag


def _build_arguments() -> dict[str, str]:
    """The torch that the tests outside use too: without it, pip may take a CUDA build of several GB."""
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch, "constraints.txt names no torch"
    given = {name: os.environ[name] for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if os.environ.get(name)}
    return {"TORCH": torch[0], **given}


def _pip_configuration() -> dict[str, str]:
    """Where this machine's pip finds packages, from its files and its environment."""
    listed = _run([sys.executable, "-m", "pip", "config", "list"], dict(os.environ)).stdout
    found = dict(re.findall(r"^(?:global\.|:env:\.)([\w-]+)='(.*)'$", listed, re.MULTILINE))
    return {key: found[key] for key in PIP_KEYS if key in found}


def _folders_of(pip: dict[str, str]) -> list[str]:
    """Folders on this disk among them, which the build must see. An index of files lies beside its files."""
    found = set()
    for key, values in pip.items():
        for value in values.split():
            parts = urlsplit(value)
            if parts.scheme in ("", "file") and Path(parts.path).is_dir():
                found.add(Path(parts.path) if key == "find-links" else Path(parts.path).parent)
    return sorted(str(folder) for folder in found)


def _run(
    command: list[str], environment: dict[str, str], *, check: bool = True, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL
    )
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done
