"""EMA on shards: each rank averages its part, a checkpoint holds the whole, and any mesh goes on with it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.optim.on_ranks import MESHES, SHAPES, Model, context_of, put, shard, values_of
from tests.ranks.staged import staged
from tests.support import quiet_trainer
from trainer_kit import AutoDataProvider, ForwardInputs, MeshStrategy, ModelProvider, Task, events
from trainer_kit.callbacks import EMA
from trainer_kit.exceptions import ConfigurationError
from trainer_kit.mesh.layout import is_distributed, layout_of, local_of
from trainer_kit.optim import AdamW, Muon
from trainer_kit.parallel import default_plan
from trainer_kit.parameters import ParameterTable
from trainer_kit.testing import run_on_ranks


def averaged(degrees, steps, state=None):
    """An EMA on this rank's mesh, after the weights took the values of some steps."""
    context, model = context_of(degrees), Model(torch.float64)
    if degrees:
        shard(model, context, degrees)
    table = ParameterTable([model])
    trainer = SimpleNamespace(parameters=table)
    ema = EMA(decay=0.5)
    ema.on_build_end(events.BuildEnd(trainer=trainer, durations={}))
    if state is not None:
        ema.load_state_dict(state)
    for step in steps:
        put(table.rows, {name: values_of(name, torch.float64, seed=step) for name in SHAPES})
        ema.on_optimizer_step(events.OptimizerStep(trainer=trainer, step=step))
    return ema, table


def job_average(degrees, state):
    ema, table = averaged(degrees, [1, 2])
    found = ema.state_dict()["averages"]
    boxes = {name: (layout_of(tensor).box, local_of(tensor).clone(), tuple(tensor.shape)) for name, tensor in found.items()}
    distributed = all(is_distributed(tensor) for tensor in found.values())
    live = all(local_of(tensor).data_ptr() == ema.averages[name].data_ptr() for name, tensor in found.items())

    resumed, _ = averaged(degrees, [3], state)  # whole tensors, as one process has them
    again, _ = averaged(degrees, [], resumed.state_dict())  # laid out over the ranks
    same = all(torch.equal(again.averages[name], resumed.averages[name]) for name in SHAPES)
    goes_on = {name: (row.layout.box, resumed.averages[name].clone()) for name, row in ((row.name, row) for row in table)}

    weights = {row.name: row.local.detach().clone() for row in table}
    ema.on_evaluate_start(None)
    seen = all(torch.equal(row.local, ema.averages[row.name]) for row in table)
    ema.on_evaluate_end(None)
    back = all(torch.equal(row.local, weights[row.name]) for row in table)
    return boxes, distributed and live and same and seen and back, goes_on


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2 x fsdp 2"])
def test_shards_average_as_one_process_and_states_fit_any_mesh(mesh):
    """B21 for every copy of the weights: whole shapes outside, uneven and empty parts inside."""
    expected, _ = averaged({}, [1, 2])
    longer, _ = averaged({}, [1, 2, 3])
    degrees = MESHES[mesh]
    for boxes, all_is_right, goes_on in run_on_ranks(len(degrees) * 2, job_average, degrees, expected.state_dict()):
        assert all_is_right and boxes.keys() == SHAPES.keys()
        for name, (box, part, shape) in boxes.items():
            assert shape == SHAPES[name] and torch.equal(part, expected.averages[name][box]), name
            assert torch.equal(goes_on[name][1], longer.averages[name][goes_on[name][0]]), name


def job_other_shape():
    ema, _ = averaged({"dp_shard": 2}, [])
    state = ema.state_dict()
    state["averages"] = {**state["averages"], "one.weight": torch.zeros(2, 3)}
    with pytest.raises(ConfigurationError, match=r"one.weight: saved with shape \(2, 3\), the model has \(1, 3\)"):
        ema.load_state_dict(state)


def test_averages_of_another_shape_are_refused_by_their_whole_shape():
    run_on_ranks(2, job_other_shape)


class Regression(Task):
    def build_forward_inputs(self, batch):
        return ForwardInputs(inputs=batch[0], state=batch[1], weight=len(batch[1]))

    def compute_loss(self, pipeline_results, state):
        return F.mse_loss(pipeline_results, state)


class Network(ModelProvider):
    """Matrices with 5 and 3 rows, of which two ranks get uneven parts, and vectors of one element, of which one gets none."""

    def initialize_model_stage(self, ctx):
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def parallelize_model_stage(self, ctx):
        if ctx.context.world_size > 1:
            default_plan(ctx)


def job_fit(degrees):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, num, generator=generator, dtype=torch.float64) for num in (3, 1))
    data = AutoDataProvider(TensorDataset(x, y), global_batch_size=4, microbatch_size=2)
    ema = EMA(decay=0.5)
    strategy, optimizer = MeshStrategy(device="cpu", dp_replicate=1, **degrees), Muon(lr=0.1, rest=AdamW(lr=0.1))
    trainer = quiet_trainer(Network(), Regression(), data, strategy=strategy, optimizer=optimizer, callbacks=[ema], total_steps=3)
    trainer.fit()
    loss = trainer.evaluate(data)["val/loss"]
    parts = {row.name: (row.layout.box, row.local.detach().clone(), ema.averages[row.name].clone()) for row in trainer.parameters}
    trainer.close()
    return loss, parts


def test_a_run_on_two_ranks_has_the_averages_of_one_process():
    """Contract 14: with Muon, which needs whole matrices; the evaluation sees the averages and the weights come back after it."""
    expected_loss, expected = job_fit({})
    for loss, parts in run_on_ranks(2, job_fit, {"dp_shard": 2}):
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        for name, (box, weight, average) in parts.items():
            torch.testing.assert_close(weight, expected[name][1][box], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(average, expected[name][2][box], rtol=1e-9, atol=1e-12)


def job_stages(layout):
    """Whether all copies of the weights are the averages inside, and what they were afterwards; the averages."""
    ema = EMA(decay=0.5)
    trainer = staged(layout, ema, model={"tie": True}, optimizer=AdamW(lr=0.1), total_steps=3)
    trainer.fit()
    weights = [row.local.detach().clone() for row in trainer.parameters]
    with ema.applied(trainer):
        inside = all(torch.equal(row.local, ema.averages[row.name]) for row in trainer.parameters)
    after = all(torch.equal(row.local, weight) for row, weight in zip(trainer.parameters, weights, strict=True))
    found = {name: average.clone() for name, average in ema.averages.items()}
    trainer.close()
    return len(weights), inside and after, found


def test_stages_have_the_averages_of_one_process():
    """Contract 12: two copies of a tied weight on one rank have one average, and both get it."""
    (_, _, expected), *_ = run_on_ranks(1, job_stages, "one")
    results = run_on_ranks(2, job_stages, "zbv")
    assert [num - len(found) for num, _, found in results] == [2, 0] and all(good for _, good, _ in results)
    for _, _, found in results:
        for name, average in found.items():
            assert torch.allclose(average, expected[name], rtol=1e-5, atol=1e-6), name
    assert results[0][2].keys() | results[1][2].keys() == expected.keys()
