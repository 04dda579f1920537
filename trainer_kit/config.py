"""`TrainerConfig`: the settings of a run, checked at the border; everything behind it trusts them.

`TrainerSettings` is the same list as keyword arguments of `Trainer`, for editors and type checkers; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trainer_kit.exceptions import ConfigurationError, UnsupportedError, explain_settings

Precision = Literal["fp32", "bf16-mixed", "bf16"]


class TrainerConfig(BaseModel):
    """All settings have working defaults. Steps are optimizer steps.

    total_steps: how many steps; None: as many as `epochs` passes over the data give.
    epochs: passes over the data; with `total_steps` too, the limit reached first ends the run. None: 1, or no limit next to total_steps.
    max_time: seconds (or a timedelta) of one `fit` after which it stops at a step boundary.
    seed: everything random in the run follows from it.
    precision: "fp32"; "bf16-mixed" (fp32 parameters, gradients and reductions, bf16 compute by autocast); "bf16" (bf16 parameters).
    grad_dtype: dtype in which gradients accumulate; None: the parameter's, or fp32 where the optimizer takes that for bf16 parameters.
    source_model: folder or file of safetensors weights to start from.
    checkpoint_trainable_only: checkpoints hold the trainable weights alone; the others come from `source_model`.
    prefetch_packs: packs fetched ahead and copied to the device; None: 0 on CPU, 2 on an accelerator.
    accumulate: microbatches per step, for plain iterables and DataLoaders.
    nonfinite: what an inf or nan gradient does: "error", "skip" (no update, no LR step) or "ignore".
    deterministic: use deterministic torch kernels only.
    compile: False, True, or keyword arguments of torch.compile: compiles the repeated blocks (a model without such: itself).
    activation_checkpointing: False, True (repeated blocks), or name patterns of modules to recompute in the backward.
    log_every: a record every that many steps. log_delay: steps after which a record's values are read from the device.
    fast_dev_run: True or a number of steps: run so many steps and evaluation packs, with no loggers and no checkpoints.
    overfit_packs: train on the first packs again and again. limit_evaluate_packs: at most so many packs per evaluation.
    detect_host_syncs: raise where a step waits for the device (needs CUDA).
    run_name: name of the run in checkpoints and logs.
    setup_timeout: seconds that ranks wait for each other while things are set up, saved or exported. step_timeout: the same in a step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    total_steps: int | None = Field(default=None, ge=0)
    epochs: int | None = Field(default=None, ge=1)
    max_time: float | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0)
    precision: Precision = "fp32"
    grad_dtype: Literal["fp32", "bf16"] | None = None
    source_model: str | None = None
    checkpoint_trainable_only: bool = False
    prefetch_packs: int | None = Field(default=None, ge=0)
    accumulate: int = Field(default=1, ge=1)
    nonfinite: Literal["error", "skip", "ignore"] = "error"
    deterministic: bool = False
    compile: bool | dict[str, Any] = False
    activation_checkpointing: bool | tuple[str, ...] = False
    log_every: int = Field(default=10, ge=1)
    log_delay: int = Field(default=2, ge=0)
    fast_dev_run: bool | int = False
    overfit_packs: int = Field(default=0, ge=0)
    limit_evaluate_packs: int | None = Field(default=None, ge=1)
    detect_host_syncs: bool = False
    run_name: str = "run"
    setup_timeout: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    step_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise explain_settings("Trainer", error, type(self).model_fields) from None

    @field_validator("precision", mode="before")
    @classmethod
    def _refuse_fp16(cls, value: object) -> object:
        if isinstance(value, str) and ("16" in value and "bf16" not in value):
            raise UnsupportedError(
                f"precision={value!r} is refused: fp16 needs loss scaling and overflows; "
                "use precision='bf16-mixed', which has the range of fp32"
            )
        return value

    @field_validator("max_time", mode="before")
    @classmethod
    def _seconds(cls, value: object) -> object:
        return value.total_seconds() if isinstance(value, timedelta) else value

    @field_validator("source_model", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return str(value) if hasattr(value, "__fspath__") else value

    @field_validator("fast_dev_run")
    @classmethod
    def _not_negative(cls, value: bool | int) -> bool | int:
        if value < 0:
            raise ValueError("expected True, False or a number of steps")
        return value

    @property
    def dev_steps(self) -> int | None:
        """The number of steps of a `fast_dev_run`, None without."""
        return int(self.fast_dev_run) if self.fast_dev_run else None


class TrainerSettings(TypedDict, total=False):
    """The fields of `TrainerConfig` as keyword arguments."""

    total_steps: int | None
    epochs: int | None
    max_time: float | timedelta | None
    seed: int
    precision: Precision
    grad_dtype: Literal["fp32", "bf16"] | None
    source_model: str | None
    checkpoint_trainable_only: bool
    prefetch_packs: int | None
    accumulate: int
    nonfinite: Literal["error", "skip", "ignore"]
    deterministic: bool
    compile: bool | dict[str, Any]
    activation_checkpointing: bool | tuple[str, ...]
    log_every: int
    log_delay: int
    fast_dev_run: bool | int
    overfit_packs: int
    limit_evaluate_packs: int | None
    detect_host_syncs: bool
    run_name: str
    setup_timeout: float
    step_timeout: float


def make_config(config: TrainerConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> TrainerConfig:
    """One config from `config=` and keyword settings; a field in both, or an unknown one, is an error."""
    if isinstance(config, TrainerConfig):
        given = {name: getattr(config, name) for name in config.model_fields_set}
    elif config is None or isinstance(config, Mapping):
        given = dict(config or {})
    else:
        raise ConfigurationError(f"config= is a {type(config).__name__}, expected a TrainerConfig or a mapping of its fields")
    both = sorted(set(given) & set(settings))
    if both:
        raise ConfigurationError(f"{', '.join(both)} stands both in config= and as an argument of Trainer; give it once")
    made = TrainerConfig(**given, **settings)
    if made.checkpoint_trainable_only and made.source_model is None:
        raise ConfigurationError(
            "checkpoint_trainable_only=True leaves the frozen weights out of checkpoints, so source_model= must say where they come from"
        )
    if made.grad_dtype == "bf16" and made.precision != "bf16":
        raise ConfigurationError(
            f"grad_dtype='bf16' would lose gradient bits under precision={made.precision!r}; use precision='bf16' or leave grad_dtype out"
        )
    return made
