"""Records the peak of device memory, or the memory of the process on a CPU.

Not here: a memory plan (`trainer.plan`). Know before editing: allocator statistics are host numbers; reading them waits for nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch

from trainer_kit.callback import Callback
from trainer_kit.callbacks._records import is_recorded

if TYPE_CHECKING:
    from trainer_kit.events import ForwardBackwardEnd

_GIB = float(2**30)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; where the system does not tell, its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class MemoryMonitor(Callback):
    """Adds to each training record, in GiB, of the rank that has most:

    memory/resident_gib: of this process.
    memory/peak_allocated_gib, memory/peak_reserved_gib: of the device since the last record; only with an accelerator.
    """

    def on_forward_backward_end(self, event: ForwardBackwardEnd) -> None:
        trainer = event.trainer
        if not is_recorded(trainer, event.step):
            return
        trainer.log("memory/resident_gib", resident_bytes() / _GIB, reduce="max")
        device = trainer.context.device
        if device.type != "cpu":
            trainer.log("memory/peak_allocated_gib", torch.accelerator.max_memory_allocated(device) / _GIB, reduce="max")
            trainer.log("memory/peak_reserved_gib", torch.accelerator.max_memory_reserved(device) / _GIB, reduce="max")
            torch.accelerator.reset_peak_memory_stats(device)
