"""What can be said of the Dockerfiles without an engine to build them: hadolint has nothing to say, what they build on
is pinned, no process is root's, each image has a health check, and what they copy is in the context.
"""

import json
import os
import re
import subprocess
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import pytest
from docker.dockerfile import Stage, read_instructions, read_stages

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
IMAGES = ("ddtree", "server")  # the targets that are images; the others are on the way to them
PINNED = re.compile(r"[^:@]+:[\w.-]*\d[\w.-]*(@sha256:[0-9a-f]{64})?")

each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix[1:])


def findings(dockerfile: Path, home: Path) -> list[str]:
    """What hadolint says of a Dockerfile, of any severity; no configuration of a user changes that."""
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    environment = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "PATH": os.environ["PATH"]}
    command = [hadolint, "--format", "json", "--disable-ignore-pragma", "--", dockerfile]
    result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    found = [f"line {finding['line']}: {finding['code']} {finding['message']}" for finding in json.loads(result.stdout)]
    assert result.returncode == bool(found), result.stderr
    return found


def chain(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those it is built on, itself first."""
    stage = stages[name]
    return [stage, *(chain(stages, stage.base) if stage.base in stages else [])]


def last(stages: dict[str, Stage], name: str, instruction: str) -> str | None:
    values = (stage.last(instruction) for stage in chain(stages, name))
    return next((value for value in values if value is not None), None)


def test_there_is_one_for_each_engine() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".tensorrt", ".trtllm"]


@each_dockerfile
def test_hadolint_finds_nothing(dockerfile: Path, tmp_path: Path) -> None:
    assert findings(dockerfile, tmp_path) == []


@each_dockerfile
@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        ((r"^FROM python\S+", "FROM python"), {"DL3006"}),
        ((r"setuptools==[\d.]+", "setuptools"), {"DL3013"}),
        ((r"^ENV PIP_NO_CACHE_DIR=1$", "ENV PIP_NO_INPUT=1"), {"DL3042"}),
        ((r"^ENTRYPOINT .*$", "ENTRYPOINT ddtree"), {"DL3025"}),
        ((r"^WORKDIR /src", "WORKDIR src"), {"DL3000"}),
        ((r"install --directory", "sudo install --directory $1"), {"DL3004", "SC2086"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else value[1],
)
def test_hadolint_finds_a_planted_fault(
    dockerfile: Path, fault: tuple[str, str], codes: set[str], tmp_path: Path
) -> None:
    text, count = re.subn(*fault, dockerfile.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "Dockerfile").write_text(text)
    found = {re.search(r": (\w+) ", finding)[1] for finding in findings(tmp_path / "Dockerfile", tmp_path)}  # type: ignore[index]
    assert codes <= found


@each_dockerfile
def test_base_images_and_packages_are_pinned(dockerfile: Path) -> None:
    stages = read_stages(dockerfile.read_text())
    bases = [stage.base for stage in stages.values() if stage.base not in stages]
    assert all(PINNED.fullmatch(base) for base in bases), bases
    lists = re.findall(r"docker/(requirements-\w+\.txt)", dockerfile.read_text())
    assert lists == [f"requirements-{dockerfile.suffix[1:]}.txt"]
    lines = (ROOT / "docker" / lists[0]).read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert packages
    assert [line for line in packages if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []


@pytest.mark.parametrize("base", ["python", "python:latest", "nvcr.io/nvidia/tensorrt@sha256:1234"])
def test_an_image_that_is_not_pinned_would_be_seen(base: str) -> None:
    assert not PINNED.fullmatch(base)


@each_dockerfile
@pytest.mark.parametrize("image", IMAGES)
def test_no_process_is_roots_and_each_image_has_a_health_check(dockerfile: Path, image: str) -> None:
    stages = read_stages(dockerfile.read_text())
    assert set(stages) == {"wheel", *IMAGES}
    user = last(stages, image, "USER")
    assert user is not None
    assert int(user) >= 1000  # a number: Kubernetes' runAsNonRoot asks for one
    for instruction in ("HEALTHCHECK", "ENTRYPOINT", "CMD"):
        value = stages[image].last(instruction)
        assert value is not None
        assert all(isinstance(word, str) for word in json.loads(value[value.index("[") :]))


@each_dockerfile
def test_what_is_copied_is_in_the_context(dockerfile: Path) -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copies = [step for step in read_instructions(dockerfile.read_text()) if step.name == "COPY" and not step.flags]
    sources = [source for step in copies for source in step.words.split()[:-1]]
    assert "pyproject.toml" in sources
    for source in sources:
        assert (ROOT / source).exists()
        parts = [source, source.split("/")[0]]
        kept = [
            not pattern.startswith("!")
            for pattern in patterns
            if any(fnmatch(part, pattern.removeprefix("!")) for part in parts)
        ]
        assert kept[-1] is False, f"{source} is left out by .dockerignore"  # the last pattern that matches decides


def test_every_package_of_ours_is_copied() -> None:
    packages = re.findall(r'^"ddtree\.\w+" = "(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(packages) == 4
    for dockerfile in DOCKERFILES:
        copied = {s for step in read_stages(dockerfile.read_text())["wheel"].steps for s in step.words.split()[:-1]}
        assert copied >= set(packages)
