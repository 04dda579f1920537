"""State that every data rank has for itself: how it is stored, and who goes on with it on another number of ranks."""

from __future__ import annotations

import pytest
import torch
import torchmetrics

from tests.support import MeanTask
from trainer_kit import MeshStrategy
from trainer_kit.checkpoint.equality import SAMPLE, check_equal_on_ranks
from trainer_kit.checkpoint.manifest import Manifest
from trainer_kit.checkpoint.per_rank import RankCounts, decode_state, encode_state, rank_key, saved_counts, share_of
from trainer_kit.exceptions import CheckpointError
from trainer_kit.metrics import Max, Mean, Sum
from trainer_kit.metrics.merge import load_merged
from trainer_kit.metrics.of_task import metrics_of
from trainer_kit.metrics.totals import Last
from trainer_kit.random_state import capture
from trainer_kit.testing import run_on_ranks


def test_any_plain_state_comes_back_bit_by_bit():
    """Contracts 27, 28: with nan, texts, tuples, integers of any size, and tensors of odd shapes and dtypes."""
    state = {
        "a": [1, (2.5, None)], 3: float("inf"), "big": 2**70, "text": "ü",
        "t": {
            "half": torch.tensor([1.5, -0.0]).bfloat16(), "none": torch.empty(0, 2), "flag": torch.tensor(True),
            "turned": torch.arange(6).view(2, 3).t(),
        },
    }  # fmt: skip
    data = encode_state(state)
    assert data.dtype == torch.uint8 and data.dim() == 1
    found = decode_state(data)
    tensors, expected = found.pop("t"), state.pop("t")
    assert found == state
    assert all(torch.equal(tensors[name], expected[name]) and tensors[name].dtype == expected[name].dtype for name in expected)


def test_random_streams_come_back():
    """Contract 28."""
    before = capture(torch.device("cpu"))
    found = decode_state(encode_state(before))
    assert torch.equal(found.pop("torch"), before.pop("torch")) and found == before


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"tensors":{"a":["F32",[3],"00"]},"values":1}', b'{"tensors":{},"values":{"$tensor":"a"}}']
)
def test_altered_bytes_are_an_error_of_the_checkpoint(data):
    """Promise 5."""
    with pytest.raises(CheckpointError):
        decode_state(torch.tensor(list(data), dtype=torch.uint8))


@pytest.mark.parametrize("num_saved, num_now", [(1, 1), (4, 4), (4, 2), (2, 4), (5, 3), (1, 3), (3, 1)])
def test_every_saved_rank_has_one_heir(num_saved, num_now):
    """Nothing counts twice and nothing is lost; the same number of ranks gives each its own; the order stays."""
    shares = [share_of(rank, num_now, num_saved) for rank in range(num_now)]
    assert [rank for share in shares for rank in share] == list(range(num_saved))
    assert num_saved != num_now or shares == [range(rank, rank + 1) for rank in range(num_now)]


def test_pipeline_ranks_have_state_of_their_own():
    """The same on the same mesh; on another one whole data ranks, with all their stages."""
    counts = RankCounts(2, 3)
    assert counts.keys("task")[:2] == ["task/ranks/0", rank_key("task", 1)] and len(counts.keys("task")) == 6
    assert [counts.share(counts, rank) for rank in range(6)] == [range(rank, rank + 1) for rank in range(6)]
    assert RankCounts(1, 1).share(counts, 0) == range(6)
    assert [counts.share(RankCounts(1, 1), rank) for rank in range(6)] == [range(0)] * 3 + [range(1)] * 3
    assert [counts.share(RankCounts(2, 2), rank) for rank in range(6)] == [range(2)] * 3 + [range(2, 4)] * 3
    assert [str(each) for each in (counts, RankCounts(2, 1))] == ["2 data ranks with 3 pipeline ranks each", "2 data ranks"]


def manifest_of(progress, keys):
    return Manifest(step=1, identity={}, values={"progress": progress}, tensors=dict.fromkeys(keys), files={})


@pytest.mark.parametrize(
    "progress, lost, more",
    [
        ({"num_data_ranks": 2, "num_pipeline_ranks": 2}, "random/ranks/3", ()),
        ({"num_data_ranks": 2, "num_pipeline_ranks": 2}, None, ("task/ranks/4",)),
        ({"num_data_ranks": 2, "num_pipeline_ranks": 2}, "task/ranks/3", ("task/ranks/x",)),
        ({"num_data_ranks": 10**12, "num_pipeline_ranks": 10**12}, None, ()),
        ({"num_data_ranks": -2, "num_pipeline_ranks": -2}, None, ()),
        ({"num_data_ranks": True, "num_pipeline_ranks": "4"}, None, ()),
        ({"num_data_ranks": 4}, None, ()),
        (None, None, ()),
    ],
)
def test_a_checkpoint_with_other_ranks_than_it_says_is_refused(progress, lost, more):
    """Promise 5, B25."""
    counts = RankCounts(2, 2)
    keys = [*counts.keys("random"), *counts.keys("task"), "model/w"]
    assert saved_counts(manifest_of(counts.values(), keys)) == counts
    with pytest.raises(CheckpointError, match="no run saves such a one"):
        saved_counts(manifest_of(progress, [*(set(keys) - {lost}), *more]))


def test_metrics_of_several_ranks_become_one():
    """As if one metric had seen all updates, in the order of the ranks; ranks without an update add nothing."""
    updates = [[torch.tensor([1.0, 2.0])], [], [torch.tensor([7.0]), torch.tensor([3.0])]]
    for kind in (Mean, Sum, Max, Last):
        metrics, whole = [kind() for _ in updates], kind()
        for metric, values in zip(metrics, updates, strict=True):
            for value in values:
                metric.update(value)
                whole.update(value)
        heir = kind()
        heir.update(torch.tensor([99.0]))  # of another time
        assert load_merged(heir, [metric.state_dict() for metric in metrics]) is None
        assert float(heir.compute()) == float(whole.compute()), kind
        load_merged(heir, [])
        assert heir.state_dict() == {}


class WithTorchmetrics(MeanTask):
    def metrics(self):
        return {"mean": torchmetrics.MeanMetric()}


@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # torchmetrics does not take a loaded state for an update
def test_metrics_of_torchmetrics_are_merged():
    """As if one metric had seen the values of both."""
    metrics = [metrics_of(WithTorchmetrics())["mean"] for _ in range(3)]
    metrics[0].update(torch.tensor([1.0, 2.0]))
    metrics[1].update(torch.tensor([6.0]))
    assert load_merged(metrics[2], [metric.state_dict() for metric in metrics[:2]]) is None
    assert float(metrics[2].compute()) == 3.0


def test_a_metric_that_cannot_merge_goes_on_with_one_and_says_so():
    class Own:
        state = None

        def reset(self):
            self.state = None

        def load_state_dict(self, state):
            self.state = state

    metric = Own()
    assert "cannot merge the states of 2 ranks" in load_merged(metric, [{"a": 1}, {"a": 2}]) and metric.state == {"a": 1}
    assert load_merged(object(), [{}]) is None


def job_equal(kind: str) -> str:
    context = MeshStrategy(device="cpu", **({"pp": 2} if kind.startswith("stages") else {})).build()
    tensors = {"callbacks/x": torch.arange(10.0), "callbacks/large": torch.zeros(3 * SAMPLE)}
    if kind in ("other value", "stages, other value") and context.rank:
        tensors["callbacks/x"] = tensors["callbacks/x"] + 1e-6
    if kind == "other kind" and context.rank:
        tensors["callbacks/large"] = torch.zeros(3 * SAMPLE, dtype=torch.int32)
    if kind in ("only on 1", "stages") and context.rank:
        tensors["callbacks/y"] = torch.ones(1)
    if kind == "only on 0" and not context.rank:
        tensors["callbacks/y"] = torch.ones(1)
    try:
        check_equal_on_ranks(tensors, context)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind, said",
    [
        ("same", ""),
        ("only on 0", ""),
        ("other value", "callbacks/x on rank 1 differs from that on rank 0"),
        ("other kind", "callbacks/large on rank 1 differs from that on rank 0"),
        ("only on 1", "callbacks/y on rank 1 is not there on rank 0"),
        ("stages", ""),
        ("stages, other value", "callbacks/x on rank 1 differs from that on rank 0"),
    ],
)
def test_tensors_that_differ_between_ranks_are_not_merged(kind, said):
    """Contract 28: the name, on every rank."""
    first, second = run_on_ranks(2, job_equal, kind)
    assert first == second and first.startswith(said) and bool(first) == bool(said)
