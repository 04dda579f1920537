"""The base of the pydantic models of this folder: frozen, unknown keys refused, and errors that say which key to change.

Pydantic lists what is wrong but not the nearest right name; here every problem gets its path and, for a misspelt key, that name.
`Settings(...)` raises ConfigurationError; inside another pydantic model the same text arrives as that model's ValidationError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer_kit.exceptions import ConfigurationError, nearest

# What other libraries call the same thing: found here, the message names our word.
SYNONYMS = {"learning_rate": "lr", "decay": "weight_decay", "epsilon": "eps", "type": "name", "beta": "betas"}


def settings_error(owner: str, problems: Iterable[tuple[tuple[str, ...], str]]) -> ConfigurationError:
    """One error for all problems, each with its path below `owner`."""
    listed = tuple(problems)
    error = ConfigurationError("; ".join(f"{'.'.join((owner, *path))}: {text}" for path, text in listed))
    error.problems = listed
    return error


class Settings(BaseModel):
    """Settings that never change after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)  # built at the first use: a light import

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise settings_error(type(self).__name__, problems_of(error, type(self).model_fields)) from None


def problems_of(error: ValidationError, fields: Iterable[str]) -> list[tuple[tuple[str, ...], str]]:
    """The path and a text for each entry of a ValidationError of a model with these fields."""
    problems: list[tuple[tuple[str, ...], str]] = []
    known = set(fields)
    for entry in error.errors(include_url=False):
        path = tuple(str(part) for part in entry["loc"])
        inner = entry.get("ctx", {}).get("error")
        if isinstance(inner, ConfigurationError) and inner.problems:
            if path and path[-1] not in known and not path[-1].isdigit():
                path = path[:-1]  # the tag by which a union chose its model: no part of what the user wrote
            problems += [(path + inner_path, text) for inner_path, text in inner.problems]
        elif entry["type"] == "extra_forbidden":
            problems.append((path, f"unknown setting {path[-1]!r}, {nearest_setting(path[-1], known)}"))
        elif entry["type"] in ("union_tag_not_found", "union_tag_invalid"):
            expected = entry.get("ctx", {}).get("expected_tags", "that of the provider")
            problems.append((path, f"found {entry['input']!r}, expected settings with a 'name': {expected}"))
        elif isinstance(inner, Exception):
            problems.append((path, str(inner)))
        else:
            problems.append((path, f"{entry['msg']} (found {entry['input']!r})"))
    return problems


def nearest_setting(name: str, fields: Iterable[str]) -> str:
    """Text that names the field a misspelt key most likely means."""
    known = set(fields)
    synonyms = {word: field for word, field in SYNONYMS.items() if field in known}
    text = nearest(name, known | set(synonyms))
    for word, field in synonyms.items():
        if text == f"did you mean {word!r}?":
            return f"did you mean {field!r} (the {word})?"
    return nearest(name, known)
