"""Bad input of a pipelined run: an error on every rank that names the stage and what was expected, after which the process goes on."""

from functools import partial

import torch
from torch import nn

from tests.ranks.stage_runs import NUM_LAYERS, WIDTH, Fit, Net, provider, rows, run_of
from tests.support import quiet_trainer
from trainer_kit import Callback, DataProvider, MeshStrategy
from trainer_kit.data import Pack
from trainer_kit.exceptions import ConfigurationError, ModelError, UnsupportedError
from trainer_kit.testing import run_on_ranks


class Silent(nn.Module):
    """Says nothing of its transfers."""

    def __init__(self, stage):
        super().__init__()
        self.layers = nn.ModuleDict({str(stage.index): nn.Linear(WIDTH, WIDTH)})

    def forward(self, inputs, shared):
        return inputs


class Empty(Net):
    """The last stage has nothing to train."""

    def __init__(self, stage):
        super().__init__(stage)
        if stage.is_last:
            del self.layers, self.head


class LocalNumbers(Net):
    """Counts its layers from 0 on every stage."""

    def __init__(self, stage):
        super().__init__(stage)
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(self.layers.values())})


class Broken(Net):
    """The constructor of the last stage fails."""

    def __init__(self, stage):
        super().__init__(stage)
        if stage.is_last:
            raise OSError("no such file")


class HalfLoaded(Net):
    """The first stage brings its weights."""

    def __init__(self, stage):
        with torch.device("cpu" if stage.is_first else "meta"):
            super().__init__(stage)


class OtherSide(Net):
    """The second stage expects something else of microbatches of two samples."""

    def stage_transfer_spec(self, inputs, boundary):
        num = len(inputs) + (len(inputs) == 2 and boundary == "incoming")
        return torch.empty(num, WIDTH, device="meta")


class Tied(Net):
    """The head is said to be the embedding; `wrong` says in which way it cannot be."""

    def __init__(self, stage, wrong):
        super().__init__(stage)
        self.wrong = wrong
        if stage.is_last and wrong == "shape":
            self.head = nn.Linear(WIDTH, WIDTH + 1, bias=False)
        if stage.is_last and wrong == "dtype":
            self.head.double()
        if stage.is_first and wrong == "frozen":
            self.embedding.requires_grad_(False)

    def tied_parameters(self):
        if not self.stage.is_last:
            return {}
        here = "heads.weight" if self.wrong == "here" else "head.weight"
        return {here: "embeddings.weight" if self.wrong == "there" else "embedding.weight"}


class OtherLengths(DataProvider):
    """The ranks of a pipeline disagree on the number of microbatches."""

    def setup(self, context, seed):
        self.number = 2 + context.rank

    def packs(self, position):
        yield Pack([rows(1)] * self.number)


class Counts(Callback):
    def __init__(self):
        self.steps = 0

    def on_optimizer_step(self, event):
        self.steps += 1


def attempt(layout, model=Net, data=None, settings=None, **strategy):
    """What a fit raises, and how many updates were made before."""
    counts, trainer = Counts(), None
    settings = {"total_steps": 1} | (settings or {})
    try:
        data = provider(8, 4) if data is None else data
        if strategy:
            given = MeshStrategy(device="cpu", **strategy)
            trainer = quiet_trainer(model, Fp32(), data, strategy=given, callbacks=[counts], **settings)
        else:
            trainer = run_of(layout, data, counts, model=model, task=Fp32(), **settings)
        trainer.fit()
        return "", "", counts.steps
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])]), counts.steps
    finally:
        if trainer is not None:
            trainer.close()


class Fp32(Fit):
    def build_forward_inputs(self, batch):
        return super().build_forward_inputs(batch.float())


def job_bad_input():
    found = {
        "no spec": attempt("1f1b", Silent),
        "no parameters": attempt("1f1b", Empty),
        "no parameters, V": attempt("zbv", Empty),
        "no stage argument": attempt("1f1b", lambda: Net()),
        "a built module": attempt("1f1b", Net()),
        "constructor": attempt("1f1b", Broken),
        "half loaded": attempt("interleaved", HalfLoaded),
        "local numbers": attempt("interleaved", LocalNumbers),
        "other side": attempt("1f1b", OtherSide, provider(8, 4, 2)),
        "other packs": attempt("1f1b", data=OtherLengths()),
        "too few": attempt("", pp=2, pipeline="dualpipe_v", data=provider(6, 3)),
        "world": attempt("", pp=3),
        "unknown schedule": attempt("", pp=2, pipeline="1f1bb"),
        "no backward": attempt("", pp=2, pipeline="forward_only_v"),
        "stages per rank": attempt("", pp=2, pipeline="1f1b", stages_per_rank=2),
        "no pipeline": attempt("", dp_replicate=2, pipeline="zbv"),
        "no stages": attempt("", dp_replicate=2, stages_per_rank=2),
        "too many stages": attempt("", pp=2, pipeline="interleaved_1f1b", stages_per_rank=NUM_LAYERS),
        "no such module": attempt("1f1b", settings={"activation_checkpointing": ("layers.0", "layers.3", "layers.9")}),
    }
    for wrong in ("here", "there", "shape", "dtype", "frozen"):
        found[f"tied {wrong}"] = attempt("zbv", partial(Tied, wrong=wrong))
    found["at last"] = attempt("zbv")
    return found


EXPECTED = {
    "no spec": (ModelError, "Silent, the module of stage 0 of 2 on rank 0, has no stage_transfer_spec(inputs, boundary)"),
    "no parameters": (ModelError, "stage 1 of 2 on rank 1 has no parameters", "distribute_layers"),
    "no parameters, V": (ModelError, "stage 3 of 4 on rank 0 has no parameters", "distribute_layers"),
    "no stage argument": (UnsupportedError, "takes no StageInfo", "2 stages", "parameter `stage`"),
    "a built module": (UnsupportedError, "a built Net cannot be cut into 2 pipeline stages", "lambda stage:"),
    "constructor": (OSError, "no such file", "on rank 1"),
    "half loaded": (ModelError, "the stages [0] have weights, and the stages [1] are on the meta device", "source_model="),
    "local numbers": (ModelError, "both have a tensor 'layers.0.linear.weight'", "number in the whole model"),
    "other side": (ModelError, "stage 0 on rank 0 sends for microbatch 0: float32 [2, 4]", "stage 1 on rank 1 expects: float32 [3, 4]"),
    "other packs": (ConfigurationError, "the ranks [0, 1] are peers of data rank 0 and must get the same pack"),
    "too few": (ConfigurationError, "'dualpipe_v' on 2 pipeline ranks needs 4 microbatches or more", "got 3"),
    "world": (ConfigurationError, "pp 3", "2 ranks"),
    "unknown schedule": (ConfigurationError, "MeshStrategy(pipeline='1f1bb'): there is no pipeline schedule", "did you mean '1f1b'?"),
    "no backward": (ConfigurationError, "'forward_only_v' has no backwards", "zbv"),
    "stages per rank": (ConfigurationError, "'1f1b' needs exactly 1 stage per rank, got 2", "interleaved_1f1b"),
    "no pipeline": (ConfigurationError, "pipeline='zbv' of MeshStrategy has no effect with pp=1"),
    "no stages": (ConfigurationError, "stages_per_rank=2 of MeshStrategy has no effect with pp=1"),
    "too many stages": (ConfigurationError, "num_layers=4 cannot be cut into num_stages=8", "stages_per_rank"),
    "no such module": (ConfigurationError, "no module is named 'layers.9'"),
    "tied here": (ModelError, "tied_parameters() of Tied returned {'heads.weight': 'embedding.weight'}"),
    "tied there": (ModelError, "tied_parameters() of stage 3", "'embeddings.weight' of an earlier stage"),
    "tied shape": (ModelError, "the tied weight 'embedding.weight' has shape (4, 4) in stage 0 and (5, 4) in stage 3"),
    "tied dtype": (ModelError, "the tied weight 'embedding.weight' has dtype torch.float32 in stage 0 and torch.float64 in stage 3"),
    "tied frozen": (ModelError, "the tied weight 'embedding.weight' has is_trainable False in stage 0 and True in stage 3"),
}


def test_bad_input_is_an_error_on_every_rank_before_the_first_update():
    """Contracts 6, 9, 12, 20, 22 and 41: the same error everywhere, long before a timeout, and the next trainer works."""
    ranks = run_on_ranks(2, job_bad_input, timeout=60.0)
    for of_rank in ranks:
        assert of_rank.pop("at last") == ("", "", 1)
        assert of_rank.keys() == EXPECTED.keys()
        for name, (kind, text, num_steps) in of_rank.items():
            expected, *parts = EXPECTED[name]
            assert kind == expected.__name__ and num_steps == 0, (name, kind, text)
            for part in parts:
                assert part in text, (name, text)
