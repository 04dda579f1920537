"""Options of the model that keep its names: recomputing activations, and compiling, block by block.

The one thing to know before editing: a user's module outlives its trainer and may be given to the next one, so each build first takes
back what an earlier one put in place of a `forward`; the newest build counts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.parallel.blocks import repeated_blocks

_REPLACED = "trainer_kit_replaced"  # where our forward keeps what it is, and the forward that the instance had before


def _replace_forward(module: nn.Module, forward: functools.partial[Any], kind: str) -> None:
    vars(forward)[_REPLACED] = (kind, vars(module).get("forward"))
    module.forward = forward


def _restore_forwards(model: nn.Module, kinds: Sequence[str]) -> None:
    """Take back the replacements of these kinds, as long as nothing else lies on top of them."""
    for module in model.modules():
        while isinstance(forward := vars(module).get("forward"), functools.partial):
            kind, before = vars(forward).get(_REPLACED, (None, None))
            if kind not in kinds:
                break
            if before is None:  # it was the one of the class
                del module.forward
            else:
                module.forward = before


def unmatched(model: nn.Module, wanted: bool | Sequence[str]) -> list[str]:
    """What of an `activation_checkpointing` finds no module of a model, each as a sentence."""
    if wanted is True:
        text = "activation_checkpointing=True found no repeated blocks in the model; give name patterns of the modules to recompute"
        return [] if repeated_blocks(model) else [text]
    names, patterns = [name for name, _ in model.named_modules()], tuple(wanted or ())
    return [
        f"activation_checkpointing={patterns!r}: no module is named {pattern!r}; see model.named_modules() for the names"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def checkpoint_activations(model: nn.Module, wanted: bool | Sequence[str], *, is_whole: bool = True) -> list[str]:
    """Recompute the activations of blocks in the backward; returns their names. Values and gradients stay the same.

    What an earlier call did is undone first, and the compiling too, which lies on top of it. is_whole: False for one stage of several,
    which need not have what is `unmatched` in it.
    """
    _restore_forwards(model, ("recomputed", "compiled"))
    if is_whole and (problems := unmatched(model, wanted)):
        raise ConfigurationError(problems[0])
    if wanted is True:
        chosen = repeated_blocks(model)
    else:
        patterns = wanted or ()
        chosen = [(name, module) for name, module in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for _, module in chosen:
        _replace_forward(module, functools.partial(checkpoint, module.forward, use_reentrant=False), "recomputed")
    return [name for name, _ in chosen]


def compile_blocks(model: nn.Module, wanted: bool | Mapping[str, Any]) -> list[str]:
    """Compile the repeated blocks in place, or the model itself if it has none; returns their names. An earlier call is undone first."""
    _restore_forwards(model, ("compiled",))
    if wanted is False:
        return []
    options = dict(wanted) if isinstance(wanted, Mapping) else {}
    blocks = repeated_blocks(model) or [("", model)]
    for _, module in blocks:
        # Not `module.compile()`, which leaves modules whose forward is torch's own (a Sequential) as they are, without a word.
        _replace_forward(module, functools.partial(torch.compile(module.forward, **options)), "compiled")
    return [name for name, _ in blocks]
