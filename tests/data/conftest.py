"""What the data tests share: the place of one process, and streams that are resumed through JSON, as a checkpoint would do."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from trainer_kit.data import DataStream, as_provider


@pytest.fixture
def context():
    """One process on the CPU."""
    return SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, data_rank=0, num_data_ranks=1, is_main=True)


@pytest.fixture
def open_stream(context):
    """A new stream over data that was set up; `state` goes through JSON. Closed at the end of the test."""
    opened = []

    def make(data, *, seed=0, prefetch=0, accumulate=1, state=None, device=context.device, **options):
        provider = as_provider(data, accumulate)
        provider.setup(context, seed)
        stream = DataStream(provider, device, seed=seed, prefetch_packs=prefetch, **options)
        opened.append(stream)
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        return stream

    yield make
    for stream in opened:
        stream.close()


@pytest.fixture
def take():
    """The microbatches of the next packs, as one list per pack; all packs by default."""

    def read(stream, count=10_000):
        packs = []
        while len(packs) < count and (pack := stream.next()) is not None:
            packs.append(torch.cat([torch.as_tensor(m) for m in pack.microbatches]).tolist())
        return packs

    return read
