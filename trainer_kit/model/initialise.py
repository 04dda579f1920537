"""Initial values as a function of (seed, name): the walk that runs every module's `reset_parameters`.

The rules, in the order in which they apply:
1. Modules are visited children first. Each one that has `reset_parameters` (or `_reset_parameters`, as some of torch's have) runs it
   with the random streams of python, torch, the device and numpy seeded by (seed, the first name of the module).
2. Its own parameters and buffers (those of a ParameterList or ParameterDict directly below belong to it too) are its to fill in any
   way. On those of other modules only the operations that `reset_mode.py` keys or lets through are allowed, so a root may hold the
   whole initialisation, `self.apply(self._init)` included. A module that calls the resets of others runs them under rules 1 and 2.
3. A tied tensor is filled by the first of its owners that has a reset. For the others' resets it is replaced by a scratch tensor.
4. Parameters that are stored in another dtype than the constructor's are filled in the constructor's and rounded. Tensors that are cut
   over ranks are filled whole, one module at a time, and each rank keeps its part; in both cases the reset sees a stand-in.
5. What no reset wrote is an error.

So the values are the same on any mesh. The caller keeps the global random streams safe. Not here: memory (`allocate.py`), loading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer_kit.exceptions import ModelError
from trainer_kit.mesh.layout import is_distributed
from trainer_kit.model.operations import object_key, storage_key
from trainer_kit.model.reset_mode import ResetMode, TensorRecord
from trainer_kit.model.stand_in import show, take_back
from trainer_kit.model.torch_init import trunc_normal_replaced
from trainer_kit.names import direct_tensors
from trainer_kit.random_state import derive_seed, forked, seed_all
from trainer_kit.torch_private import written_class


def initialise(
    module: nn.Module, seed: int, device: torch.device, *, dtypes: Mapping[str, torch.dtype] | None = None, ready: Collection[str] = ()
) -> list[TensorRecord]:
    """Give every parameter and buffer of `module` its initial value, in place.

    dtypes: the constructor's dtype of tensors that are stored in another one. ready: canonical names that have values already.
    Gives the record of each tensor, with the operations that filled it. ModelError for a tensor that nothing wrote.
    """
    walk = _Walk(module, seed, device, dtypes or {})
    walk.run()
    walk.check(ready)
    return list(walk.records.values())


def reset_method(module: nn.Module) -> str | None:
    """The name of the method that gives a module its initial values."""
    return next((name for name in ("reset_parameters", "_reset_parameters") if callable(getattr(module, name, None))), None)


class _Walk:
    def __init__(self, module: nn.Module, seed: int, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
        self._root, self._seed, self._device = module, seed, device
        self._names = {owner: name for name, owner in module.named_modules()}
        self._depth = 0
        self._mode = ResetMode(seed)
        self._holders = {owner: [owner, *_parameter_lists(owner)] for owner in module.modules() if reset_method(owner)}
        self.records, self._filled_by = self._find_tensors(dtypes)
        self._mode.known = {storage_key(record.tensor): record for record in self.records.values()}
        cut = (record for record in self.records.values() if is_distributed(record.tensor))
        self._objects = {record: object_key(record.tensor) for record in cut}

    def _find_tensors(self, dtypes: Mapping[str, torch.dtype]) -> tuple[dict[int, TensorRecord], dict[int, nn.Module]]:
        """The record of each tensor and the module whose reset fills it, both by the id of the tensor."""
        responsible = {holder: owner for owner, holders in self._holders.items() for holder in holders}
        records: dict[int, TensorRecord] = {}
        filled_by: dict[int, nn.Module] = {}
        for holder, prefix in self._names.items():
            for attribute, tensor in direct_tensors(holder):
                name = f"{prefix}.{attribute}" if prefix else attribute
                if id(tensor) not in records:
                    records[id(tensor)] = TensorRecord(name, self._label(holder), tensor, dtypes.get(name, tensor.dtype))
                if holder in responsible:
                    filled_by.setdefault(id(tensor), responsible[holder])
        return records, filled_by

    def _label(self, module: nn.Module) -> str:
        name = written_class(module).__name__
        return f"{name} {self._names[module]!r}" if self._names[module] else name

    def run(self) -> None:
        """Run every reset once, children first."""
        with ExitStack() as stack:
            for owner in self._holders:
                stack.enter_context(_method_wrapped(owner, reset_method(owner) or "", functools.partial(self._reset, owner)))
            stack.enter_context(trunc_normal_replaced(self._mode.truncated_normal))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._device)  # what a reset computes is computed where it will be used
            stack.enter_context(self._mode)
            for owner in _children_first(self._root, set()):
                if owner in self._holders:
                    getattr(owner, reset_method(owner) or "")()

    def _reset(self, owner: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """One reset, called by the walk or by the reset of another module, whose random streams then go on undisturbed."""
        self._depth += 1
        label = f"{reset_method(owner)} of {self._label(owner)}"
        try:
            with forked(self._device) if self._depth > 1 else nullcontext():
                seed_all(derive_seed(self._seed, "module", self._names[owner]), self._device)
                stand_ins = [
                    stand_in for holder in self._holders[owner]
                    for stand_in in show(holder, self.records, lambda key: self._filled_by[key] is owner, self._mode)
                ]  # fmt: skip
                with self._mode.scope(label, frozenset(stand_in.key for stand_in in stand_ins)):
                    original(*args, **kwargs)
                with self._mode.paused():
                    for stand_in in stand_ins:
                        take_back(stand_in, self._mode)
        except Exception as error:
            error.add_note(f"in {label}, which trainer_kit calls to give the model its initial values")
            raise
        finally:
            self._depth -= 1

    def check(self, ready: Collection[str]) -> None:
        """Refuse tensors without a value, and values that a module assigned to the parameter of another."""
        for record in self.records.values():
            is_other = record in self._objects and object_key(record.tensor) != self._objects[record]
            if is_other or storage_key(record.tensor) not in self._mode.known:
                raise ModelError(
                    f"{record.name!r} was assigned (`.data = ...`) by the reset of a module that does not own it, {record.owner}; "
                    "write in place: nn.init functions, copy_, normal_"
                )
        missing = [r for r in self.records.values() if not r.is_initialised and r.name not in ready]
        if missing:
            raise ModelError(
                "these tensors have no initial value:\n"
                + "\n".join(f"  {r.name} of {r.owner}" + (" (written in part)" if r.num_written else "") for r in missing)
                + "\nA callable builds the model on the meta device, where values are lost, so each value must come from a reset. "
                "Give the module a method reset_parameters(self) that sets all elements of its own tensors, such as "
                "nn.init.normal_(self.weight, std=0.02), or self.table.copy_(...) for a buffer computed from constants; "
                "or pass a built nn.Module in place of the callable"
            )


def _parameter_lists(module: nn.Module) -> Iterator[nn.Module]:
    """The ParameterLists and ParameterDicts directly below: they have no reset, their parent has."""
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield child
            yield from _parameter_lists(child)


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


@contextmanager
def _method_wrapped(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `module.name(...)` is `wrapper(original, ...)`, whoever calls it."""
    attributes = vars(module)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = functools.partial(wrapper, getattr(module, name))
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(own)
