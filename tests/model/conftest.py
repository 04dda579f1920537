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
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, without its import of the compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
