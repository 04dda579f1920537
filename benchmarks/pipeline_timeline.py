"""Measured timelines of pipeline schedules beside the simulated ones, of stages that sleep for known times: the runtime, not the processor.

    python benchmarks/pipeline_timeline.py [--ranks 4] [--microbatches 12] [--unit 0.05] [--draw]

Forward, backward of inputs and backward of weights of a stage sleep one unit of time each, on gloo ranks of this machine. Prints a table:
duration and share of waits within the ranks' own spans, measured and simulated. PASS if they agree within 5% and the schedules in a V are
below 1F1B of the same model. The exit status says the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import nn

from trainer_kit import ForwardInputs, MeshStrategy, Task
from trainer_kit.data import Pack
from trainer_kit.pipeline.building import ProgramCache
from trainer_kit.pipeline.runtime import PipelineRunner
from trainer_kit.pipeline.simulation import Costs
from trainer_kit.pipeline.stage import Stage
from trainer_kit.pipeline.timeline import Timeline
from trainer_kit.testing import run_on_ranks

SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zb1p": 2, "zbv": 2, "dualpipe_v": 2}
TOLERANCE = 0.05


class SleepBackward(torch.autograd.Function):
    """Sleeps where the gradient of the inputs passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage whose three parts take `seconds` each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(2)), seconds
        self.weight.register_hook(lambda _: time.sleep(seconds))

    def forward(self, inputs: torch.Tensor, shared: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return SleepBackward.apply(inputs * self.weight, self.seconds)

    def stage_transfer_spec(self, inputs: torch.Tensor, boundary: str) -> torch.Tensor:
        return torch.empty(inputs.shape, device="meta")


class Mean(Task):
    """The mean of the outputs."""

    def build_forward_inputs(self, batch: Any) -> ForwardInputs:
        return ForwardInputs(inputs=batch, weight=1)

    def compute_loss(self, pipeline_results: Any, state: Any) -> torch.Tensor:
        return pipeline_results.mean()


def measure(schedule: str, stages_per_rank: int, num_microbatches: int, seconds: float) -> Timeline:
    """The timeline of the second pack, on each rank."""
    context = MeshStrategy(pp=torch.distributed.get_world_size(), pipeline=schedule, stages_per_rank=stages_per_rank, device="cpu").build()
    group = context.pipeline_group
    assert group is not None
    cache = ProgramCache(schedule, group.size(), stages_per_rank=stages_per_rank)
    stages = [Stage(index, module := Sleeper(seconds), module) for index in cache.layout.stages_of(group.rank())]
    runner = PipelineRunner(stages, context, cache, group, record=True)
    for _ in range(2):
        runner.run_pack(Pack([torch.ones(2)] * num_microbatches), Mean(), {}, losses=None)
    return runner.timeline()


def main() -> int:
    """Run all schedules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--unit", type=float, default=0.05)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    passed, durations = True, {}
    print(f"{'schedule':18} {'measured':>10} {'simulated':>10} {'ratio':>7} {'waits':>7} {'simulated':>10}")
    for name, stages_per_rank in SCHEDULES.items():
        unit = options.unit * 2 / stages_per_rank  # the whole model takes as long in all of them
        timeline = run_on_ranks(options.ranks, measure, name, stages_per_rank, options.microbatches, unit)[0]
        cache = ProgramCache(name, options.ranks, stages_per_rank=stages_per_rank)
        program, costs = cache.training(options.microbatches), Costs(unit, unit, unit)
        simulated = program.simulate(costs)
        ratio = timeline.duration / simulated.duration
        durations[name] = timeline.duration
        passed = passed and abs(ratio - 1) <= TOLERANCE
        times, waits = (timeline.duration, simulated.duration), (timeline.wait_share, simulated.wait_share)
        print(f"{name:18} {times[0]:9.3f}s {times[1]:9.3f}s {ratio:7.3f} {waits[0]:7.1%} {waits[1]:10.1%}")
        if options.draw:
            print(program.draw(costs, measured=timeline))
    passed = passed and max(durations["zbv"], durations["dualpipe_v"]) < durations["1f1b"]
    print("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
