"""Random numbers for modules that see a part of the sequence: the ranks of a tensor group must not draw the same ones there.

The streams of the peers are equal, so that whole activations get the same dropout everywhere. A module of a part runs on a stream of its
own, from a seed that is drawn from the common one: nothing needs to be saved, and recomputed activations get the same numbers again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_kit.random_state import derive_seed
from trainer_kit.torch_private import read_cpu_scalar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DRAW_NOTHING = (nn.LayerNorm, nn.RMSNorm, nn.Identity)


class OwnRandomNumbers:
    """Puts `module` on a stream of this rank while it runs in training mode."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._tensor_rank, self._device_type = mesh.get_local_rank(), mesh.device_type
        self._before: list[list[tuple[Any, torch.Tensor]]] = []  # a stack: a module may call itself
        if type(module) not in _DRAW_NOTHING:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _streams(self) -> list[Any]:
        return [torch.random] if self._device_type == "cpu" else [torch.random, torch.get_device_module(self._device_type)]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if not module.training:
            self._before.append([])
            return
        seed = derive_seed(int(read_cpu_scalar(torch.randint(2**53, ()))), self._tensor_rank)
        self._before.append([(stream, stream.get_rng_state()) for stream in self._streams()])
        torch.default_generator.manual_seed(seed)
        if self._device_type != "cpu":
            torch.get_device_module(self._device_type).manual_seed(seed)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        for stream, state in self._before.pop() if self._before else ():  # empty: another hook raised before ours could run
            stream.set_rng_state(state)
