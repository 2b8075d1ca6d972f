"""A Dockerfile as stages of instructions, and those carried out in a folder: no container engine, no root, no registry.

What a base image brings, a Python with pip, is stood in for by a clean virtual environment; its file system by a
folder, into which the absolute paths of the instructions are moved.
"""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("build", "cache", "engines", "home", "models", "opt", "src", "wheels")  # at the root of our images
_ABSOLUTE = re.compile(rf"(?<![\w.$}}/])/(?=(?:{'|'.join(FOLDERS)})\b)")
_FLAGS = re.compile(r"^(?:--\S+\s+)*")  # of an instruction
_ACCOUNT = "useradd "  # a step that begins so makes the image's account and its folders: not carried out


@dataclass(frozen=True)
class Instruction:
    name: str  # in capitals
    value: str  # continuation lines joined

    @property
    def flags(self) -> str:
        return _FLAGS.match(self.value)[0].strip()  # type: ignore[index]

    @property
    def words(self) -> str:
        return _FLAGS.sub("", self.value)


def read_instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a Dockerfile, comments left out."""
    joined = ""
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined.removesuffix("\\")
            continue
        name, _, value = joined.partition(" ")
        yield Instruction(name.upper(), value.strip())
        joined = ""


@dataclass
class Stage:
    """A stage of a Dockerfile."""

    base: str  # an image, or the name of another stage
    steps: list[Instruction] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        return next((step.value for step in reversed(self.steps) if step.name == name), None)


def read_stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    stages: dict[str, Stage] = {}
    for step in read_instructions(text):
        if step.name == "FROM":
            base, _, name = step.value.split()  # IMAGE AS NAME
            stage = stages[name] = Stage(base)
        else:
            stage.steps.append(step)
    return stages


class Image:
    """A stage, carried out in a folder by ``build``."""

    def __init__(self, root: Path):
        self.root = root
        self.directory = "/"
        self.variables: dict[str, str] = {}
        self.commands: dict[str, list[str]] = {}  # HEALTHCHECK, ENTRYPOINT, CMD
        self.skipped: list[str] = []  # RUN steps that were not carried out

    def path(self, path: str) -> Path:
        return self.root / os.path.join(self.directory, path).lstrip("/")

    def moved(self, text: str) -> str:
        """``text`` with the image's absolute paths as those in the folder."""
        return _ABSOLUTE.sub(f"{self.root}/", text)

    @property
    def environment(self) -> dict[str, str]:
        """All variables of a process of the image. The last stands for the loader's cache of the base image."""
        return {
            "PATH": f"{self.root}/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.root / "home" / "ddtree"),
            "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
            **{name: self.moved(value) for name, value in self.variables.items()},
        }

    def start(
        self, command: list[str], variables: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a process as in a container of the image."""
        environment = self.environment | dict(variables or {})
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            raise FileNotFoundError(f"{command[0]} is not on the image's PATH")
        return subprocess.Popen(
            [program, *map(self.moved, command[1:])],
            env=environment,
            cwd=self.path("."),
            stdin=subprocess.DEVNULL,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def run(self, command: list[str], variables: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run a process as in a container of the image: its exit code and all it wrote."""
        process = self.start(command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate()
        return process.returncode, output


def pip_variables() -> dict[str, str]:
    """Where pip takes packages from, and where it keeps them: this machine's. Images keep none."""
    cache = {"PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"), "PIP_NO_CACHE_DIR": ""}
    return cache | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def build(
    stages: Mapping[str, Stage], target: str, *, context: Path, folder: Path, arguments: Mapping[str, str]
) -> dict[str, Image]:
    """Carry out the stages of a Dockerfile up to ``target`` in ``folder``; images by stage.

    Args:
        context: folder that COPY reads.
        arguments: build arguments (ARG), by name.

    Raises:
        RuntimeError: a RUN step failed; the message holds its output.
    """
    images: dict[str, Image] = {}
    for name, stage in stages.items():
        images[name] = images[stage.base] if stage.base in images else _base_image(folder / name)
        for step in stage.steps:
            _carry_out(step, images[name], images, context, arguments)
        if name == target:
            break
    return images


def _base_image(root: Path) -> Image:
    venv.create(root / "usr" / "local", with_pip=True, symlinks=True)
    for name in FOLDERS:
        (root / name).mkdir()
    (root / "home" / "ddtree").mkdir()
    return Image(root)


def _carry_out(
    step: Instruction, image: Image, images: Mapping[str, Image], context: Path, arguments: Mapping[str, str]
) -> None:
    match step.name:
        case "WORKDIR":
            image.directory = step.value
            image.path(".").mkdir(parents=True, exist_ok=True)
        case "ENV":
            image.variables |= dict(re.findall(r"(\w+)=(\S+)", step.value))
        case "ARG":
            name, _, default = step.value.partition("=")
            image.variables[name] = arguments.get(name, default)
        case "COPY":
            *sources, destination = step.words.split()
            origin = images[step.flags.removeprefix("--from=")].root if step.flags else context
            for source in sources:
                _copy(origin / source.lstrip("/"), image.path(destination), destination.endswith("/"))
        case "RUN" if step.words.startswith(_ACCOUNT):
            image.skipped.append(step.words)
        case "RUN":
            code, output = image.run(["/bin/sh", "-c", step.words], pip_variables())
            if code != 0:
                raise RuntimeError(f"RUN {step.words}\n{output}")
        case "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
            image.commands[step.name] = json.loads(step.words.removeprefix("CMD "))
        case "USER" | "EXPOSE":
            pass
        case _:
            raise NotImplementedError(f"{step.name} is not known here")


def _copy(source: Path, destination: Path, into: bool) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "work")  # as .dockerignore has it
        shutil.copytree(source, destination, dirs_exist_ok=True, ignore=ignored)
        return
    if into or destination.is_dir():
        destination = destination / source.name
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, destination)
