"""A small model in stages, its task and its packs, for tests of the pipeline runtime; the same on one process and on ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer_kit import ForwardInputs, Loss, MeshStrategy, Task
from trainer_kit.data import Pack
from trainer_kit.pipeline import SequentialRunner
from trainer_kit.pipeline.building import ProgramCache
from trainer_kit.pipeline.runtime import PipelineRunner
from trainer_kit.pipeline.stage import Stage

WIDTH = 4


class Part(nn.Module):
    """A stage. Between stages go two tensors with a gradient, one of them of another shape, one without a graph, and integers; the last
    stage returns a tensor. `shared` is added everywhere."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(index)
            self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64), nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
            self.w = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
            self.unused = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.index, self.is_first, self.is_last = index, index == 0, index == num_stages - 1

    def forward(self, inputs: Any, shared: Any) -> Any:
        if self.is_first:
            inputs = {"hidden": inputs["x"], "side": (inputs["x"].sum(1),), "ids": inputs["ids"], "fixed": torch.ones(2).double()}
        ids, fixed = inputs["ids"], inputs["fixed"]
        hidden = inputs["hidden"] + self.b(torch.tanh(self.a(inputs["hidden"]))) * fixed.sum()
        hidden = hidden + shared["bias"] + ids.double().unsqueeze(1) * self.w
        side = inputs["side"][0] * self.w[0] + hidden.mean(1)
        if self.is_last:
            return hidden.sum(1) + side
        return {"ids": ids + 1, "side": (side,), "hidden": hidden, "fixed": fixed.detach()}

    def stage_transfer_spec(self, inputs: Any, boundary: str) -> Any:
        num = len(inputs["x"])
        spec = {"hidden": (num, WIDTH), "ids": (num,), "side": (num,), "fixed": (2,)}
        made = {n: torch.empty(s, dtype=torch.int64 if n == "ids" else torch.float64, device="meta") for n, s in spec.items()}
        made["side"] = (made["side"],)
        return dict(reversed(made.items())) if boundary == "incoming" else made


class Fit(Task):
    """A batch is (number of samples, seed); the weight is that number. `weigh`: "declared", "returned", "tensor", "terms", or "none"."""

    def __init__(self, weigh: str = "declared") -> None:
        self.weigh, self.losses = weigh, []

    def build_forward_inputs(self, batch: Any) -> ForwardInputs:
        num, seed = batch
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(max(num, 2), WIDTH, dtype=torch.float64, generator=generator)
        target = torch.randn(max(num, 2), dtype=torch.float64, generator=generator)
        weight = {"declared": num, "terms": {"main": num, "second": 1 + seed % 2}}.get(self.weigh)
        return ForwardInputs(
            inputs={"x": x, "ids": torch.arange(len(x))}, shared={"bias": torch.tensor(0.1).double()}, state=(target, num), weight=weight
        )

    def compute_loss(self, pipeline_results: Any, state: Any) -> Any:
        target, num = state
        loss = (pipeline_results - target).square().mean()
        self.losses.append(loss.item())
        if self.weigh == "terms":
            return {"main": loss, "second": pipeline_results.mean()}
        if self.weigh in ("declared", "none"):
            return loss
        return Loss(loss, torch.tensor(num) if self.weigh == "tensor" else num)

    def process_outputs(self, pipeline_results: Any, state: Any) -> Any:
        return pipeline_results


def pack_of(*sizes: int, first: int = 0, **options: Any) -> Pack:
    return Pack([(size, first + index) for index, size in enumerate(sizes)], **options)


def build_context(**degrees: int) -> Any:
    """The context of a mesh."""
    return MeshStrategy(device="cpu", **degrees).build()


def build_runner(
    context: Any,
    schedule: str,
    num_stages: int,
    *,
    make: Any = Part,
    frozen: Any = (),
    splits: bool = True,
    receive_ahead: int = 0,
    **options: Any,
) -> tuple[PipelineRunner, dict[int, Any]]:
    """A runner over this rank's stages, and their modules by stage."""
    group = context.group("regular", "pp")
    num_ranks = group.size()
    cache = ProgramCache(schedule, num_ranks, stages_per_rank=num_stages // num_ranks, receive_ahead=receive_ahead)
    context.stage_layout = cache.layout
    modules = {index: make(index, num_stages) for index in cache.layout.stages_of(group.rank())}
    freeze(modules, frozen)
    stages = [Stage(index, module, module, splits=splits) for index, module in modules.items()]
    return PipelineRunner(stages, context, cache, group, **options), modules


def gradients(modules: Any, weight: Any) -> dict[str, torch.Tensor]:
    """By global name; missing ones are zeros."""
    found = {}
    for index, module in modules.items():
        for name, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[f"{index}.{name}"] = gradient / weight
            parameter.grad = None
    return found


def one_process(num_stages: int, *, make: Any = Part, frozen: Any = ()) -> tuple[SequentialRunner, dict[int, nn.Module]]:
    """The same model whole."""
    modules = {index: make(index, num_stages) for index in range(num_stages)}
    freeze(modules, frozen)

    def call(inputs: Any, shared: Any) -> Any:
        for module in modules.values():
            inputs = module(inputs, shared)
        return inputs

    return SequentialRunner(call, MeshStrategy(device="cpu").build(), modules=list(modules.values())), modules


def freeze(modules: Any, frozen: Any) -> None:
    """frozen: stages, or (stage, name of a parameter)."""
    for index, module in modules.items():
        for name, parameter in module.named_parameters():
            if index in frozen or (index, name) in frozen:
                parameter.requires_grad_(False)
