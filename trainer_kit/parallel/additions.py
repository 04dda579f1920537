"""`Addition`: a submodule whose outputs are added to those of its layer, such as a low-rank adapter, on whole weights and on cut ones.

    layer(x) = what the layer computes itself + addition(x)

The layer keeps its class, its parameters and their names. Not here: which additions there are (`trainer_kit.peft`), and how a cut layer
computes (`tensor_layers.py`). Before editing: what cuts a layer replaces its `forward` and adds the addition itself, to outputs that may
be a part, or one term of a sum over ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_kit.mesh.layout import is_distributed


class Addition(nn.Module):
    """What is added to the outputs of the Linear or Embedding that holds it.

    `forward` takes the layer's inputs and uses its own parameters through `local_part`. dropout: the submodule that draws its random
    numbers; `nn.Identity` if it draws none.
    """

    dropout: nn.Module

    @abstractmethod
    def is_added(self) -> bool:
        """Whether it is to be added in this call."""

    def check_settled(self) -> None:
        """Raise StateError while the weight of the layer is not its own: then it must not be saved, nor be loaded into."""

    @abstractmethod
    def cut_dims(self, dim: int) -> Mapping[str, int | None]:
        """How its parameters are cut when the weight of the layer is, along `dim`, by name.

        None: it stays whole, and each rank computes one term of its gradient, since it meets a part of the layer's inputs or outputs.
        """


def attach(layer: nn.Module, name: str, addition: Addition) -> None:
    """Make `addition` the submodule `name` of a layer, and add its outputs from now on."""
    layer.add_module(name, addition)
    vars(layer)["forward"] = _WithAddition(layer)


def addition_of(layer: nn.Module) -> Addition | None:
    """The addition that a layer has."""
    return next((child for child in layer.children() if isinstance(child, Addition)), None)


def with_addition(layer: nn.Module, outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The outputs of a layer for these inputs, with the addition, if it has one; the sum is taken in the wider of the two dtypes."""
    addition = addition_of(layer)
    if addition is None or not addition.is_added():
        return outputs
    return (outputs + addition(inputs)).to(outputs.dtype)


def local_part(parameter: Any) -> torch.Tensor:
    """The part of this rank, with a graph; all of a parameter that is not cut."""
    return parameter.to_local() if is_distributed(parameter) else parameter


@dataclass(slots=True)
class _WithAddition:
    """In the place of the `forward` of a layer."""

    layer: nn.Module

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return with_addition(self.layer, type(self.layer).forward(self.layer, input, *args, **kwargs), input)
