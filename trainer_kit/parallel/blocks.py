"""The repeated blocks of a model: what is sharded, recomputed and compiled one by one."""

from __future__ import annotations

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model: members of its outermost lists (ModuleList, ModuleDict, Sequential) whose class occurs twice.

    A member of a ModuleDict under a number is one even if it is alone, as in a pipeline stage with one layer. One that several lists share
    comes once, under its first name.
    """
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            classes = Counter(type(child) for child in module.children())
            blocks = {
                child: f"{prefix}{name}"
                for name, child in module.named_children()
                if (classes[type(child)] > 1 or (isinstance(module, nn.ModuleDict) and name.isdecimal()))
                and any(True for _ in child.children())
            }
            if blocks:
                found.update({block: name for block, name in blocks.items() if block not in found})
                return
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    visit(model, "")
    return [(name, block) for block, name in found.items()]
