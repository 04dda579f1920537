"""`ModelCaller`: how a stage calls its model, decided once from the model's class.

The stage form `forward(inputs, shared)` is taken if the class has `stage_transfer_spec`, or if the parameters are named exactly
`inputs, shared`; every other model is called the ordinary way. Before editing: this runs once per microbatch and stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_kit.data.pack import is_movable_object
from trainer_kit.exceptions import ModelError
from trainer_kit.task import Args
from trainer_kit.torch_private import written_class


class ModelCaller:
    """Calls `module` with what a task put into `ForwardInputs`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.stage_form = has_stage_form(module)

    def __call__(self, inputs: Any, shared: Any = None) -> Any:
        """Ordinary models: a mapping as keywords, a tuple as positional arguments, `Args` as both, anything else as one argument.

        A tuple that moves itself to a device, such as a `PackedSequence`, is one argument.
        """
        if self.stage_form:
            return self._module(inputs, shared)
        if shared is not None:
            raise ModelError(
                f"ForwardInputs(shared=...) was given, but {written_class(self._module).__name__} is called the ordinary way; put the "
                "values into inputs=, or give the model the stage form forward(self, inputs, shared)"
            )
        if isinstance(inputs, torch.Tensor):
            return self._module(inputs)
        if isinstance(inputs, tuple) and not is_movable_object(inputs):
            return self._module(*inputs)
        if isinstance(inputs, Args):
            return self._module(*inputs.args, **inputs.kwargs)
        if isinstance(inputs, Mapping):
            return self._module(**inputs)
        return self._module(inputs)


def has_stage_form(module: nn.Module) -> bool:
    """Whether the model is called as `module(inputs, shared)`."""
    original = getattr(module, "_orig_mod", module)  # torch.compile wraps a module and hides its signature
    if hasattr(type(original), "stage_transfer_spec"):
        return True
    # The class's forward: the instance's may be wrapped, which hides its parameters. A scripted module's is no function.
    forward = inspect.getattr_static(type(original), "forward")
    return inspect.isfunction(forward) and list(inspect.signature(forward).parameters)[1:] == ["inputs", "shared"]
