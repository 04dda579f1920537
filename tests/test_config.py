"""The settings of a run: one list in two forms, each with an effect, and errors with the nearest name.

`EFFECTS` has one row per setting: what a run shows without it and with it. A new setting without a row fails the test.
"""

import typing
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import Gradients, MeanTask, Scalar, quiet_trainer, sgd
from trainer_kit import AutoDataProvider, Callback, MeshStrategy, SupervisedTask, TrainerConfig
from trainer_kit.callbacks import Checkpoint
from trainer_kit.checkpoint import read_manifest
from trainer_kit.config import TrainerSettings, make_config
from trainer_kit.exceptions import ConfigurationError, NonFiniteError
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import group_timeout


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# What the keyword arguments take besides: the config turns it into its own type.
ALSO_TAKEN = {"max_time": timedelta}


def test_keyword_arguments_and_config_are_one_list():
    """Design section 2: the TypedDict that types `Trainer(**settings)` has the fields of TrainerConfig, with their types."""
    hints = typing.get_type_hints(TrainerSettings)
    assert list(hints) == list(TrainerConfig.model_fields)
    for name, field in TrainerConfig.model_fields.items():
        expected = field.annotation | ALSO_TAKEN[name] if name in ALSO_TAKEN else field.annotation
        assert set(typing.get_args(hints[name])) == set(typing.get_args(expected)), name
        assert typing.get_args(expected) or hints[name] == expected, name
    assert TrainerSettings.__total__ is False


def test_every_setting_has_a_default_and_is_described():
    TrainerConfig()
    described = [name for name in TrainerConfig.model_fields if f"{name}:" in TrainerConfig.__doc__]
    assert described == list(TrainerConfig.model_fields)


def test_a_config_survives_json_and_never_changes():
    config = make_config(None, {"total_steps": 3, "max_time": timedelta(minutes=2), "activation_checkpointing": ("layers.*",)})
    assert config.max_time == 120.0
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match=r"frozen"):
        config.seed = 3


def test_config_and_settings_add_up():
    assert make_config({"seed": 3}, {"total_steps": 5}) == TrainerConfig(seed=3, total_steps=5)
    assert make_config(TrainerConfig(seed=3), {"total_steps": 5}) == TrainerConfig(seed=3, total_steps=5)
    with pytest.raises(ConfigurationError, match=r"seed stands both"):
        make_config(TrainerConfig(seed=0), {"seed": 0})


@pytest.mark.parametrize("make", [lambda **s: make_config(None, s), lambda **s: make_config(s, {}), TrainerConfig])
def test_an_unknown_setting_is_an_error_with_the_nearest_name(make):
    """B141: however the settings come in."""
    with pytest.raises(ConfigurationError, match=r"totl_steps.*did you mean 'total_steps'"):
        make(totl_steps=3)


def fit(model: Any = None, data: Any = None, *, task: Any = None, callbacks: Any = (), **settings: Any):
    trainer = quiet_trainer(model or Scalar(), task or MeanTask(), data or [t(1)] * 4, callbacks=callbacks, **settings)
    trainer.fit()
    return trainer


def steps(**settings: Any) -> int:
    return fit(**settings).step


def initial_weight(**settings: Any) -> Any:
    trainer = quiet_trainer(lambda: nn.Linear(1, 1), MeanTask(), [t(1)], **settings)
    trainer.build()
    return trainer.model.weight.item()


def dtypes(**settings: Any) -> tuple[torch.dtype, torch.dtype]:
    """Of the parameters, and of what the model computes."""
    seen = []

    class Look(SupervisedTask):
        def compute_loss(self, pipeline_results, state):
            seen.append(pipeline_results.dtype)
            return pipeline_results.float().mean()

    data = [(torch.ones(2, 3, dtype=torch.bfloat16 if settings.get("precision") == "bf16" else torch.float32), t(1, 1))]
    trainer = fit(nn.Linear(3, 1), data, task=Look(nn.functional.mse_loss), **settings)
    return trainer.model.weight.dtype, seen[0]


def gradient_sum(**settings: Any) -> float:
    """256 and sixteen times 0.5, added in the dtype of the gradients: 264 in fp32; bf16 has no number between 256 and 258."""
    seen = Gradients()
    data = [t(256).bfloat16()] + [t(0.5).bfloat16()] * 16
    fit(Scalar(), data, task=MeanTask("none"), precision="bf16", accumulate=17, callbacks=[seen], **settings)
    return round(float(seen.seen[0]["w"]) * 17)


def saved_names(folder: Any, **settings: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    quiet_trainer(model, MeanTask(), [t(1)]).export(folder / "base")
    model[0].requires_grad_(False)
    trainer = fit(
        model,
        [torch.ones(1, 1)],
        task=returning_mean(),
        callbacks=[Checkpoint(folder / "c", every=1)],
        source_model=folder / "base",
        **settings,
    )
    return [name for name in read_manifest(trainer.callbacks[-1].folder.path_for(1)).tensors if name.startswith("model/")]


def returning_mean():
    class Means(MeanTask):
        def compute_loss(self, pipeline_results, state):
            return pipeline_results.mean()

    return Means()


def packs_read_before_the_first_step(**settings: Any) -> int:
    read, seen = [], []

    class Data:
        def __iter__(self):
            for index in range(8):
                read.append(index)
                yield t(1)

    class Look(Callback):
        def on_step_start(self, event):
            seen.append(len(read))

    fit(data=Data(), callbacks=[Look()], total_steps=1, **settings)
    return seen[0]


def after_a_bad_gradient(**settings: Any) -> Any:
    try:
        return fit(data=[t(float("inf")), t(1)], **settings).model.w.item()
    except NonFiniteError:
        return "error"


def deterministic_inside(**settings: Any) -> bool:
    seen = []

    class Look(Callback):
        def on_step_start(self, event):
            seen.append(torch.are_deterministic_algorithms_enabled())

    fit(callbacks=[Look()], **settings)
    return seen[0]


GRAPHS: list[Any] = []


def keep_graph(graph: Any, inputs: Any) -> Any:
    """A backend of torch.compile that runs what was captured as it is."""
    GRAPHS.append(graph)
    return graph.forward


def num_compiled(**settings: Any) -> int:
    """Captured graphs of a model with two blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x):
            return torch.tanh(self.inner(x))

    GRAPHS.clear()
    torch.compiler.reset()
    fit(nn.Sequential(Block(), Block()), [torch.ones(1, 1)], task=returning_mean(), **settings)
    return len(GRAPHS)


def forwards_per_step(**settings: Any) -> int:
    calls = []

    class Block(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(1, 1), Block(1, 1))
    fit(model, [torch.ones(1, 1)], task=returning_mean(), **settings)
    return len(calls)


def records(**settings: Any) -> list[tuple[int, int]]:
    """(finished steps when it came, its own step)."""
    seen = []

    class Look(Callback):
        def on_metrics(self, event):
            seen.append((event.trainer.step, event.step))

    fit(data=[t(1)] * 5, callbacks=[Look()], **settings)
    return seen


def packs_seen(**settings: Any) -> list[float]:
    seen = []

    class Look(Callback):
        def on_step_start(self, event):
            seen.append(event.microbatches[0].item())

    fit(data=[t(1), t(2), t(3)], callbacks=[Look()], total_steps=4, **settings)
    return seen


def evaluated(**settings: Any) -> float:
    return quiet_trainer(Scalar(1.0), MeanTask(), [t(1)], **settings).evaluate([t(2), t(4), t(9)])["val/loss"]


def host_syncs(**settings: Any) -> str:
    try:
        fit(strategy=MeshStrategy(device="cpu"), **settings)
    except ConfigurationError as error:
        return "needs CUDA" if "CUDA" in str(error) else "unclear"
    return "nothing"


def saved_run_name(folder: Any, **settings: Any) -> str:
    fit(callbacks=[Checkpoint(folder / "c", every=4)], **settings)
    return read_manifest(folder / "c" / "step-00000004").identity["run_name"]


def weight_from(folder: Any, **settings: Any) -> float:
    trainer = quiet_trainer(Scalar(5.0), MeanTask(), [t(1)])
    trainer.export(folder / "model")
    other = quiet_trainer(Scalar(1.0), MeanTask(), [t(1)], **{name: folder / value for name, value in settings.items()})
    other.build()
    return other.model.w.item()


def timeouts_of_rank_0(**settings: Any) -> tuple[float, float]:
    """Of the process group of two ranks, in seconds: while things are set up, and in the loop."""
    return run_on_ranks(2, job_timeouts, settings)[0]


def job_timeouts(settings: dict[str, Any]) -> tuple[float, float]:
    context = quiet_trainer(Scalar(), MeanTask(), [t(1)], strategy=MeshStrategy(device="cpu"), **settings).context
    set_up = group_timeout(torch.distributed.group.WORLD).total_seconds()
    with context.short_timeout():
        in_loop = group_timeout(torch.distributed.group.WORLD).total_seconds()
    context.close()
    return set_up, in_loop


FP32, BF16 = torch.float32, torch.bfloat16
# Setting: (what a run shows, without it, its value, with it).
EFFECTS: dict[str, tuple[Callable[..., Any], Any, Any, Any]] = {
    "total_steps": (steps, 4, 3, 3),
    "epochs": (steps, 4, 2, 8),
    "max_time": (lambda **s: steps(data=[t(1)] * 300, **s) < 300, False, 1e-9, True),
    "seed": (lambda **s: initial_weight(**s) == initial_weight(), True, 1, False),
    "precision": (dtypes, (FP32, FP32), "bf16-mixed", (FP32, BF16)),
    "grad_dtype": (gradient_sum, 256, "fp32", 264),
    "source_model": (weight_from, 1.0, "model", 5.0),
    "checkpoint_trainable_only": (saved_names, ["model/0.weight", "model/1.weight"], True, ["model/1.weight"]),
    "prefetch_packs": (packs_read_before_the_first_step, 1, 3, 4),
    "accumulate": (steps, 4, 2, 2),
    "nonfinite": (after_a_bad_gradient, "error", "skip", 0.0),
    "deterministic": (deterministic_inside, False, True, True),
    "compile": (num_compiled, 0, {"backend": keep_graph}, 2),
    "activation_checkpointing": (forwards_per_step, 1, ("1",), 2),
    "log_every": (records, [(5, 5)], 2, [(4, 2), (5, 4), (5, 5)]),
    "log_delay": (lambda **s: records(log_every=2, **s), [(4, 2), (5, 4), (5, 5)], 0, [(2, 2), (4, 4), (5, 5)]),
    "fast_dev_run": (steps, 4, 2, 2),
    "overfit_packs": (packs_seen, [1, 2, 3, 1], 2, [1, 2, 1, 2]),
    "limit_evaluate_packs": (evaluated, 5.0, 2, 3.0),
    "detect_host_syncs": (host_syncs, "nothing", True, "needs CUDA"),
    "run_name": (saved_run_name, "run", "mine", "mine"),
    "setup_timeout": (timeouts_of_rank_0, (1800.0, 300.0), 700.0, (700.0, 300.0)),
    "step_timeout": (timeouts_of_rank_0, (1800.0, 300.0), 60.0, (1800.0, 60.0)),
}
NEED_A_FOLDER = {"source_model", "checkpoint_trainable_only", "run_name"}


def test_every_setting_has_a_row():
    assert list(EFFECTS) == list(TrainerConfig.model_fields)


# torch.compile looks at `.grad` of the inputs it is given, and torch warns of that itself.
DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@DYNAMO_WARNS
@pytest.mark.parametrize("name", EFFECTS)
def test_every_setting_has_an_effect(name, tmp_path):
    """Contract 45: a setting that changes nothing would be ignored in silence."""
    show, without, value, with_it = EFFECTS[name]
    for part, settings, expected in (("a", {}, without), ("b", {name: value}, with_it)):
        (tmp_path / part).mkdir()
        assert (show(tmp_path / part, **settings) if name in NEED_A_FOLDER else show(**settings)) == expected


def test_pure_bf16_has_bf16_parameters():
    assert dtypes(precision="bf16") == (BF16, BF16)


@DYNAMO_WARNS
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_modules_of_torch_itself_are_compiled_too_and_train_as_before(num_blocks):
    """Contract 45: blocks, or a whole model, that are a Sequential; the same weights as without."""

    def run(**settings):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(num_blocks)])
        data = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        return fit(model, data, task=returning_mean(), optimizer=sgd(0.1), **settings).model.state_dict()

    plain = run()
    GRAPHS.clear()
    torch.compiler.reset()
    other = run(compile={"backend": keep_graph})
    assert GRAPHS and list(plain) == list(other)
    assert all(torch.allclose(plain[name], other[name], rtol=1e-6) for name in plain)


def test_trainable_only_without_anything_frozen_is_reported(tmp_path, caplog):
    """Contract 45: the checkpoint holds all weights all the same, so the setting has no effect."""
    quiet_trainer(Scalar(), MeanTask(), [t(1)]).export(tmp_path / "base")
    fit(source_model=tmp_path / "base", checkpoint_trainable_only=True)
    assert "checkpoint_trainable_only" in caplog.text


def test_a_description_shows_flags_as_words():
    data = AutoDataProvider([t(1)] * 8, 4, 2, shuffle=True)
    rows = dict(quiet_trainer(Scalar(), MeanTask(), data).describe().sections["batch"])
    assert (rows["shuffle"], rows["drop last"], rows["global batch size"], rows["accumulation"]) == ("True", "False", "4", "2")
