"""Checks of constructor arguments that several callbacks share, and the report of a metric that never came.

Each check names the class and the argument, says what was found and what was expected, and gives the value back.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer_kit.exceptions import ConfigurationError, nearest

if TYPE_CHECKING:
    from trainer_kit.callback import Callback
    from trainer_kit.trainer import Trainer

logger = logging.getLogger("trainer_kit")

Mode = Literal["min", "max"]


def whole_number(owner: Callback, name: str, value: Any, *, minimum: int = 1) -> int:
    """An int of at least `minimum`; True is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(f"{type(owner).__name__}({name}={value!r}): expected a whole number of at least {minimum}")
    return value


def number(
    owner: Callback, name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf, below: float = math.inf
) -> float:
    """A real number inside the bounds; NaN is refused. `below` excludes its own value, unless it is inf."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not (value > above and value >= at_least and (value < below or below == math.inf)):
        bounds = [f"above {above}"] if above > -math.inf else []
        bounds += [f"of at least {at_least}"] if at_least > -math.inf else []
        bounds += [f"below {below}"] if below < math.inf else []
        raise ConfigurationError(f"{type(owner).__name__}({name}={value!r}): expected a number {' and '.join(bounds)}".rstrip())
    return float(value)


def choice(owner: Callback, name: str, value: Any, valid: Sequence[str]) -> str:
    """One of the valid names."""
    if value not in valid:
        expected = " or ".join(repr(v) for v in valid)
        raise ConfigurationError(f"{type(owner).__name__}({name}={value!r}): expected {expected}; {nearest(str(value), valid)}")
    return cast(str, value)


def metric_name(owner: Callback, name: str, value: Any) -> str:
    """A name such as "val/loss"."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{type(owner).__name__}({name}={value!r}): expected the name of a logged value, such as 'val/loss'")
    return value


def local_path(owner: Callback, name: str, value: Any) -> str:
    """An absolute local path; `file://` is accepted, other URLs are refused before the run begins."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigurationError(f"{type(owner).__name__}({name}={value!r}): expected a path")
    text = str(os.fspath(value))
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "file":
        raise ConfigurationError(
            f"{type(owner).__name__}({name}={text!r}): {scheme}:// is not supported, since lines are appended in place; use a local path"
        )
    return os.path.abspath(os.path.expanduser(rest if separator else text))


def warn_missing_metric(owner: Callback, trainer: Trainer, metric: str, seen: Iterable[str]) -> None:
    """Say at the end of a run that a callback waited for a value that nobody logged; on one rank, as all have the same records."""
    if not trainer.context.is_main:
        return
    names = sorted(seen)
    hint = nearest(metric, names) if names else "no value was recorded at all"
    logger.warning("%s had no effect: %r was never recorded (%s)", type(owner).__name__, metric, hint)
