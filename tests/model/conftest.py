"""What the tests of the build share."""

import pytest
import torch

from trainer_kit.mesh import DistributedContext, MeshStrategy


@pytest.fixture
def context():
    return DistributedContext(MeshStrategy(), torch.device("cpu"))


@pytest.fixture
def nan_memory():
    """Uninitialised memory holds nan, so that whatever nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
