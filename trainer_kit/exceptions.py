"""The errors trainer_kit raises on purpose.

    TrainerKitError
    ├── ConfigurationError (ValueError)          a setting, an argument or the data does not fit
    ├── UnsupportedError (NotImplementedError)   a combination that is refused, with its reason
    ├── ModelError (ValueError)                  the model, its parameters or its loss cannot be trained
    ├── CheckpointError (RuntimeError)           something saved is missing, broken, foreign or could not be written
    ├── NonFiniteError (ArithmeticError)         a gradient is inf or nan
    └── StateError (RuntimeError)                a call at a time at which it has no meaning
    Interrupted (SystemExit, code 143)           the run was asked to end by a signal, and saved

A message says what was found, what was expected, which argument to change, and the usual cause where there is one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TrainerKitError(Exception):
    """Root of the errors below, for callers that catch them all."""


class ConfigurationError(TrainerKitError, ValueError):
    """A setting, an argument or the data does not fit.

    problems: (path, text) of each wrong setting where several are told at once, so that an outer object can put its own path before.
    """

    problems: tuple[tuple[tuple[str, ...], str], ...] = ()


class UnsupportedError(TrainerKitError, NotImplementedError):
    """A combination of settings that is refused."""


class ModelError(TrainerKitError, ValueError):
    """The model, its parameters or its loss cannot be trained as they are."""


class CheckpointError(TrainerKitError, RuntimeError):
    """A checkpoint or model state is missing, broken, foreign, or could not be written."""


class NonFiniteError(TrainerKitError, ArithmeticError):
    """A gradient contains inf or nan and the policy is `nonfinite="error"`."""


class StateError(TrainerKitError, RuntimeError):
    """A call at a time at which it has no meaning, such as saving while the trainer sleeps."""


class Interrupted(SystemExit):
    """Raised by `fit` after a signal ended the run in order; exits the script with code 143."""

    def __init__(self, message: str) -> None:
        super().__init__(143)
        self.message = message

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str]]:
        return type(self), (self.message,)

    def __str__(self) -> str:
        return self.message


def explain_settings(owner: str, error: Any, fields: Iterable[str]) -> ConfigurationError:
    """What pydantic's ValidationError says first, in our words."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return ConfigurationError(f"{owner} has no setting {name!r}; {nearest(name, fields)}")
    return ConfigurationError(f"{owner}({name}={first['input']!r}): {first['msg'].removeprefix('Value error, ')}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Text that names the closest valid spelling, or all valid names when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "valid names: " + ", ".join(names)
