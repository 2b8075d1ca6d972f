"""Engines of random pairs, built once a session."""

from collections.abc import Iterator

import pytest
import torch

from .models import CASES, Pair, make_pair


@pytest.fixture(scope="session", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """An engine of each kind of target."""
    return make_pair(tmp_path_factory.mktemp(request.param.name), request.param)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Models of this size are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
