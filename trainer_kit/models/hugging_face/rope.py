"""Rotary settings of a `config.json`: reads `rope_parameters` and, of older files, `rope_theta` with `rope_scaling`; writes the former."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.models.rotary_scaling import LinearScaling, Llama3Scaling, RotaryScaling, YaRNScaling

DEFAULT_THETA = 10_000.0
KNOWN_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# The optional fields of YaRNScaling that Hugging Face has under the same names.
YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def read_rope(settings: Mapping[str, Any], max_seq_len: int, label: str) -> tuple[float, RotaryScaling | None]:
    """Theta, and the scaling of a `config.json`. UnsupportedError for a type that is not known."""
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    given = settings.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{label} has {name}={given!r}; an object was expected")
    if per_kind := [key for key, value in given.items() if isinstance(value, Mapping)]:
        raise UnsupportedError(f"{label} has {name} for each kind of layer ({', '.join(per_kind)}); one for all layers is supported")
    theta = float(given.get("rope_theta") or settings.get("rope_theta") or DEFAULT_THETA)
    rope_type = given.get("rope_type") or given.get("type") or "default"
    for key, source in (("partial_rotary_factor", given), ("partial_rotary_factor", settings), ("mrope_section", given)):
        if source.get(key) not in (None, 1, 1.0):
            raise UnsupportedError(f"{label} has {key}={source[key]!r}, which is not supported: all of a head turns, by one position")
    if rope_type not in KNOWN_TYPES:
        raise UnsupportedError(f"{label} has {name} of the type {rope_type!r}, which is not supported; known are {', '.join(KNOWN_TYPES)}")
    if rope_type in ("default", "dynamic"):  # a dynamic one leaves lengths up to max_position_embeddings as they are, and we have no others
        return theta, None
    try:
        return theta, _scaling(rope_type, given, int(settings.get("original_max_position_embeddings") or 0), max_seq_len)
    except KeyError as error:
        raise ConfigurationError(f"{label} has {name} of the type {rope_type!r} without {error}") from None


def _scaling(rope_type: str, given: Mapping[str, Any], original: int, max_seq_len: int) -> RotaryScaling:
    if rope_type == "linear":
        return LinearScaling(float(given["factor"]))
    original = original or int(given.get("original_max_position_embeddings") or max_seq_len)
    if rope_type == "llama3":
        return Llama3Scaling(float(given["factor"]), original, float(given["low_freq_factor"]), float(given["high_freq_factor"]))
    options = {name: given[name] for name in YARN_OPTIONS if given.get(name) is not None}
    return YaRNScaling(float(given.get("factor") or max_seq_len / original), original, **options)


def write_rope(theta: float, scaling: RotaryScaling | None) -> dict[str, Any]:
    """The `rope_parameters` of a `config.json`."""
    written: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is None:
        return written
    if isinstance(scaling, LinearScaling):
        return written | {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        frequencies = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        original = {"original_max_position_embeddings": scaling.original_max_seq_len}
        return written | {"rope_type": "llama3", "factor": scaling.factor} | original | frequencies
    if isinstance(scaling, YaRNScaling):
        options = {name: value for name in YARN_OPTIONS if (value := getattr(scaling, name)) is not None}
        original = {"original_max_position_embeddings": scaling.original_max_seq_len}
        return written | {"rope_type": "yarn", "factor": scaling.factor} | original | options
    raise UnsupportedError(f"transformers has no name for rope_scaling={scaling!r}; LinearScaling, Llama3Scaling and YaRNScaling have one")
