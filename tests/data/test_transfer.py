"""Copies to an accelerator on a side stream; needs one."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.data.transfer import DeviceTransfer

needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")


@needs_accelerator
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_packs_arrive_whole_while_others_are_under_way(ahead, pin_memory):
    """Contract 19, and the memory of a pack that is still read is not handed out again."""
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    transfer = DeviceTransfer(device, pin_memory=pin_memory, ahead=ahead)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2), torch.tensor([3, 2]))
    copies = [transfer.start([{"x": torch.full((1 << 20,), float(i)), "i": i}, packed]) for i in range(8)]
    sums = []
    for copy in copies:
        batch, moved = transfer.finish(copy)
        assert batch["x"].device == device and moved.data.device == device and moved.batch_sizes.device.type == "cpu"
        sums.append((batch["x"].double().sum(), batch["i"]))
        del batch, moved
    assert [(total.item(), i) for total, i in sums] == [(float(i << 20), i) for i in range(8)]


def test_a_device_without_streams_copies_in_order():
    """On the meta device nothing is pinned and no event is recorded."""
    transfer = DeviceTransfer(torch.device("meta"), pin_memory=True, ahead=True)
    copy = transfer.start([torch.zeros(3)])
    assert copy.arrived is None
    assert transfer.finish(copy)[0].device.type == "meta"
