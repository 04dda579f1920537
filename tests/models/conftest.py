"""What the tests of models share: a small config, and the context of one process."""

import pytest
import torch

from trainer_kit.mesh import DistributedContext, MeshStrategy
from trainer_kit.models import DecoderConfig


@pytest.fixture
def config():
    return DecoderConfig(vocab_size=11, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=16, intermediate_size=24, max_seq_len=12)


@pytest.fixture
def context():
    return DistributedContext(MeshStrategy(), torch.device("cpu"))
