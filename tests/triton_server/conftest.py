"""The demo pair behind a real Triton server, and the Python API on the same engine to compare with."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from triton_server.environment import PACKAGES
from triton_server.server import Server

from ddtree.runtime import LLM
from ddtree.runtime.engine_cache import cached_engine, demo_pair
from ddtree.runtime.triton_repository import write_repository

sys.path.append(str(PACKAGES))  # tritonclient, behind the NumPy of this process

pytest.register_assert_rewrite("triton_server.mixed_requests")

# Whole trees: the shapes of passes, and with them the last bits of a logit, do not depend on how fast the machine is.
SETTINGS = {"adaptive": False, "budget": 8, "threads": 1}


@pytest.fixture(scope="session")
def engine() -> Path:
    return cached_engine(*demo_pair())


@pytest.fixture(scope="session")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="session")
def start_server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """Starts a server with arguments of LLM; whoever starts it stops it."""

    def start(**settings: object) -> Server:
        folder = tmp_path_factory.mktemp("triton")
        write_repository(engine, folder / "repository", SETTINGS | settings)
        server = Server(folder / "repository", folder / "log")
        server.start()
        return server

    return start


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    server = start_server()
    yield server
    server.stop()
