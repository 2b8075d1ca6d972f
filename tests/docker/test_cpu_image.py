"""The steps of Dockerfile.cpu in clean environments of Python: they install what the image needs and nothing for a
GPU, its command and its server answer, and its health checks pass where the image works and fail where it does not.
"""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from docker.dockerfile import Image, build, pip_variables, read_stages

ROOT = Path(__file__).parents[2]
STAGES = read_stages((ROOT / "docker" / "Dockerfile.cpu").read_text())
READY_SECONDS = 120


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    arguments = {}
    # Where pip has a CPU build from elsewhere, PyTorch's index is not needed; `make TORCH_INDEX=...` names another.
    if "TORCH_INDEX" in os.environ or torch.version.cuda is None:
        arguments["TORCH_INDEX"] = os.environ.get("TORCH_INDEX", "")
    images = build(STAGES, "server", context=ROOT, folder=tmp_path_factory.mktemp("image"), arguments=arguments)
    return images["server"]


def test_a_step_that_fails_ends_the_build(tmp_path: Path) -> None:
    stages = read_stages("FROM python:3.11 AS image\nARG CODE=0\nRUN --mount=type=cache,target=/x \\\n  exit $CODE\n")
    with pytest.raises(RuntimeError, match=r"RUN exit \$CODE"):
        build(stages, "image", context=ROOT, folder=tmp_path / "image", arguments={"CODE": "3"})


def test_only_the_account_was_left_out(image: Image) -> None:
    assert [step.split()[0] for step in image.skipped] == ["useradd"]


def test_nothing_is_there_for_a_gpu(image: Image) -> None:
    script = "import torch; print(torch.version.cuda)"
    assert image.run(["python3", "-c", script]) == (0, "None\n")
    code, packages = image.run(["python3", "-m", "pip", "freeze"])
    assert code == 0
    assert "nvidia-cu" not in packages


def test_every_package_has_the_version_that_is_written_down(image: Image) -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "docker" / "requirements-cpu.txt").read_text(), re.M))
    code, listed = image.run(["python3", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"])
    assert code == 0
    installed = {
        re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"].partition("+")[0]
        for package in json.loads(listed.splitlines()[0])
    }
    assert {name: version for name, version in installed.items() if name not in ("pip", "ddtree-trtllm")} == pinned


def test_the_command_writes_a_text(image: Image) -> None:
    code, output = image.run([*_command("ddtree", "ENTRYPOINT"), *_command("ddtree", "CMD"), "--max-tokens", "8"])
    assert code == 0, output
    assert "ddtree: 8 tokens" in output


def test_the_engine_of_the_demo_pair_is_in_the_image(image: Image) -> None:
    before = sorted((image.root / "cache").iterdir())
    assert image.run(["ddtree", "inspect"])[0] == 0
    assert sorted((image.root / "cache").iterdir()) == before
    assert any((engine / "config.json").exists() for engine in before)


def test_the_health_check_of_the_command_needs_a_working_model(image: Image) -> None:
    check = _command("ddtree", "HEALTHCHECK")
    code, output = image.run(check)
    assert code == 0, output
    code, _ = image.run(check, {"DDTREE_CACHE": "/dev/null"})
    assert code != 0


def test_a_server_that_lacks_a_library_ends_the_build(image: Image, tmp_path: Path) -> None:
    loader = tmp_path / "ldd"
    loader.write_text("#!/bin/sh\necho 'libpython3.so => not found'\n")
    loader.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{image.environment['PATH']}"}
    code, output = image.run(["sh", "/opt/triton/install_triton.sh", "/build/triton"], pip_variables() | path)
    assert code != 0
    assert "tritonserver lacks libraries" in output
    assert "libpython3.so => not found" in output


@pytest.fixture
def ports() -> dict[str, str]:
    with socket.socket() as http, socket.socket() as grpc, socket.socket() as metrics:
        for listener in (http, grpc, metrics):
            listener.bind(("127.0.0.1", 0))
        names = {"HTTP_PORT": http, "GRPC_PORT": grpc, "METRICS_PORT": metrics}
        return {name: str(listener.getsockname()[1]) for name, listener in names.items()}


@pytest.fixture
def server(image: Image, ports: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The server as the image starts it, on the repository that its other command wrote."""
    (repository,) = image.commands["CMD"]
    code, output = image.run(["ddtree", "triton", "--output", repository, "--force"])
    assert code == 0, output
    loopback = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"]
    command = [*image.commands["ENTRYPOINT"], repository, *loopback]
    with (tmp_path / "log").open("w") as log:
        process = image.start(command, ports, stdout=log, stderr=subprocess.STDOUT)
        yield process
        process.kill()
        process.wait()


def test_the_server_answers_and_its_health_check_follows_it(
    image: Image, server: subprocess.Popen[str], ports: dict[str, str], tmp_path: Path
) -> None:
    check = image.commands["HEALTHCHECK"]
    assert image.run(check, ports)[0] != 0  # it takes seconds to load
    deadline = time.monotonic() + READY_SECONDS
    while image.run(check, ports)[0] != 0:
        failed = server.poll() is not None or time.monotonic() > deadline
        assert not failed, (tmp_path / "log").read_text()
        time.sleep(0.2)
    request = urllib.request.Request(
        f"http://127.0.0.1:{ports['HTTP_PORT']}/v2/models/tensorrt_llm/generate",
        json.dumps({"text_input": "Once", "sampling_param_max_tokens": 4}).encode(),
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert len(json.load(answer)["text_output"]) > len("Once")
    server.send_signal(signal.SIGTERM)  # what `docker stop` sends; the script has made way for the server
    assert server.wait(60) == 0
    assert image.run(check, ports)[0] != 0


def _command(stage: str, name: str) -> list[str]:
    value = STAGES[stage].last(name)
    assert value is not None
    return json.loads(value[value.index("[") :])
