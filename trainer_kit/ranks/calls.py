"""A call of a function in another process: the place of the function and its pickled arguments; values, never shared memory.

A test module that pytest imported under a name that no import finds is loaded from its file. Functions of a script come from a second
import of the script under the name `__mp_main__`, as in multiprocessing: what is under `if __name__ == "__main__":` is not run.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from trainer_kit.exceptions import ConfigurationError


@dataclass(frozen=True)
class Place:
    """Where a module comes from: its name, and its file and package for the case that the name alone does not lead to it."""

    name: str
    file: str | None
    package: str | None


@dataclass(frozen=True)
class Call:
    """A function and its arguments, ready to travel. main: the script, if the function or an argument comes from it."""

    place: Place
    qualname: str
    arguments: bytes
    main: Place | None


def place_of(module: ModuleType) -> Place:
    """The place of a module of this process."""
    return Place(module.__name__, getattr(module, "__file__", None), getattr(module, "__package__", None))


def make_call(caller: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    """Raises ConfigurationError for a function that another process can't find, or arguments that can't be pickled."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    qualname = getattr(function, "__qualname__", "")
    try:
        found = operator.attrgetter(qualname)(module)
    except AttributeError:
        found = None
    if module is None or found is not function:
        raise ConfigurationError(
            f"{caller} got {function!r}, which another process can't find by its name; expected a function at the top level of a module. "
            f"A lambda, a function inside a function, a method of an object or a partial can't be sent: pass what it needs as arguments"
        )
    try:
        pickled = pickle.dumps(arguments)
    except Exception as error:  # pickling runs code of any class and raises anything
        raise ConfigurationError(
            f"an argument of {function.__name__} given to {caller} can't be pickled: {type(error).__name__}: {error}; "
            f"pass values, and build the rest inside the function"
        ) from error
    main = sys.modules["__main__"]
    needs_main = module is main or b"__main__" in pickled
    return Call(place_of(module), qualname, pickled, place_of(main) if needs_main else None)


def find(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments of a call, in the process that runs it."""
    if call.main is not None:
        _load_main(call.main)
    return operator.attrgetter(call.qualname)(load(call.place)), pickle.loads(call.arguments)


def load(place: Place) -> ModuleType:
    """The module by its name if that leads to its file, else from the file under its name."""
    loaded = sys.modules.get(place.name)
    if loaded is not None and getattr(loaded, "__file__", None) == place.file:
        return loaded
    try:
        spec = importlib.util.find_spec(place.name)
    except ModuleNotFoundError:
        spec = None  # a package on the way is not found either
    if place.file is None or (spec is not None and spec.origin == place.file):
        return importlib.import_module(place.name)
    package = place.name.rpartition(".")[0]
    while package:
        sys.modules.setdefault(package, ModuleType(package))  # pickle asks for them when it looks for a class of the module
        package = package.rpartition(".")[0]
    return _load_file(place.name, place)


def _load_main(place: Place) -> None:
    """Make the script `__main__` here too, unless that was done for an earlier call."""
    if place.file is None:
        raise ConfigurationError("a function or an argument is from an interactive session; put it into a module that can be imported")
    if getattr(sys.modules["__main__"], "__file__", None) != place.file:
        sys.modules["__main__"] = _load_file("__mp_main__", place)


def _load_file(name: str, place: Place) -> ModuleType:
    assert place.file is not None
    loader = SourceFileLoader(name, place.file)
    spec = importlib.util.spec_from_file_location(name, place.file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__package__ = place.package
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module
