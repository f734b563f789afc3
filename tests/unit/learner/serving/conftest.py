from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.model import BaseModel
from tests.unit.learner.serving.harness import Adapter, Oracle, tiny_base, write_adapter


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """Versions 1 to 4, each with weights of its own."""
    root = tmp_path_factory.mktemp("adapters")
    folders = [root / f"v{version}" for version in range(1, 5)]
    return [
        Adapter(version, folder, write_adapter(folder, seed=version))
        for version, folder in enumerate(folders, start=1)
    ]


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory, adapters: list[Adapter]) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"), adapters)


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    """A base model that the test may wrap."""
    return tiny_base(tmp_path)
