"""What users meet: tasks, metrics, predictions and generation on a decoder that is cut over a tensor group."""

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.common import decoder, gradients, largest_difference, make_mesh, tokens, whole_gradients
from trainer_kit.causal_lm import CausalLMTask
from trainer_kit.metrics import Accuracy
from trainer_kit.models import generate
from trainer_kit.parallel import parallelize_tensor
from trainer_kit.testing import run_on_ranks
from trainer_kit.torch_private import whole_tensor

BATCH = {"input_ids": tokens(0), "labels": tokens(0).masked_fill(tokens(0) < 3, -100)}


def loss_of_task(model):
    task = CausalLMTask()
    given = task.build_forward_inputs(BATCH)
    return task.compute_loss(model(given.inputs["input_ids"]), given.state)


def task_job():
    mesh, model = make_mesh(tp=2), decoder()
    expected, expected_loss = gradients(model, [loss_of_task]), loss_of_task(model).item()
    logits, task = model(BATCH["input_ids"]).detach(), CausalLMTask()
    accuracy = Accuracy()
    accuracy.update(logits, BATCH["labels"])
    parallelize_tensor(model, mesh, model.tensor_plan(2))
    loss = loss_of_task(model)
    loss.backward()
    assert type(loss) is torch.Tensor and abs(loss.item() - expected_loss) < 1e-6  # the task computes it in fp32
    assert largest_difference(whole_gradients(model, mesh), expected) < 1e-5
    with torch.no_grad():
        found = model(BATCH["input_ids"])
        torch.testing.assert_close(task.process_outputs(found, None), logits)
        here = Accuracy()
        here.update(found, BATCH["labels"])
        assert abs(loss_of_task(model).item() - expected_loss) < 1e-6
    return float(here.compute()), float(accuracy.compute())


def test_the_language_model_task():
    """Loss, gradients, evaluation, accuracy over cut logits, and whole ones for predictions, as on one process."""
    assert all(found == expected for found, expected in run_on_ranks(2, task_job))


def generate_job():
    mesh, model = make_mesh(tp=2), decoder()
    expected = generate(model, tokens(0), 3, temperature=0.0)
    parallelize_tensor(model, mesh, {name: style for name, style in model.tensor_plan(2).items() if style != "sequence"})
    return torch.equal(generate(model, tokens(0), 3, temperature=0.0), expected)


def test_generation():
    assert run_on_ranks(2, generate_job) == [True, True]


def autocast_job(is_sequence):
    """Under bf16 autocast: how far the gradients are from fp32, here and on one process."""
    mesh, model = make_mesh(tp=2), decoder().float()
    exact = gradients(model, [mixed_loss])
    with torch.autocast("cpu", torch.bfloat16):
        alone = gradients(model, [mixed_loss])
        plan = model.tensor_plan(2)
        parallelize_tensor(model, mesh, plan if is_sequence else {name: style for name, style in plan.items() if style != "sequence"})
        loss = mixed_loss(model)
    loss.backward()
    found = whole_gradients(model, mesh)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    return largest_difference(found, exact), largest_difference(alone, exact)


def mixed_loss(model):
    logits = model(tokens(0))
    return whole_tensor(F.cross_entropy(logits.flatten(0, 1).float(), tokens(0).roll(-1, 1).flatten(), reduction="sum"))


@pytest.mark.parametrize("is_sequence", [False, True])
def test_mixed_precision(is_sequence):
    """Design decision 10: gradients are fp32, as near to those of fp32 as on one process."""
    for found, alone in run_on_ranks(2, autocast_job, is_sequence):
        assert 1e-4 < found < 3 * alone < 0.2
