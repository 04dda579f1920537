"""`PipelineRunner`: runs packs through the stages of a pipeline, as `SequentialRunner` does through one stage.

The program says what each rank does; here is what surrounds it: the weights of the microbatches, fillers, the comparison of the ranks, and
what is left of a pack that failed. Before editing: all ranks of the world make the same host collectives in the same order: the sum of
the check, then those of the weights, then, on a mismatch or after a failure, exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.data import Pack, batch_size
from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.metrics import Metric
from trainer_kit.pipeline.building import ProgramCache
from trainer_kit.pipeline.drawing import Drawing
from trainer_kit.pipeline.inputs import cut_inputs, filler_inputs, forward_inputs, pack_inputs
from trainer_kit.pipeline.loss_starts import LossStarts
from trainer_kit.pipeline.loss_sums import LossSums
from trainer_kit.pipeline.outcomes import EvaluationOutcome, Outcome, PredictionOutcome, TrainingOutcome
from trainer_kit.pipeline.pack_check import PackCheck
from trainer_kit.pipeline.pack_run import Microbatch, PackRun, Surroundings
from trainer_kit.pipeline.program import Program
from trainer_kit.pipeline.rank_weights import RankWeights
from trainer_kit.pipeline.recording import Recorder
from trainer_kit.pipeline.simulation import Costs
from trainer_kit.pipeline.stage import Stage, StagePasses, StagesSync
from trainer_kit.pipeline.timeline import Timeline
from trainer_kit.pipeline.transfer_spec import check_describes_transfers, transfer_spec
from trainer_kit.pipeline.transport import Transport
from trainer_kit.task import ForwardInputs, Task, Weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.parallel.context import SequenceParts


class PipelineRunner:
    """Runs packs through the stages of this rank, in step with the other ranks of its pipeline.

    stages: those that `programs.layout` puts on this rank. group: the ranks of this pipeline, in the order of the layout's places.
    autocast: makes the context in which forwards and losses run; None: as they are. first_trainable: the first stage of the model with
    something to train, the same number on all ranks; no gradient goes to those before it. begin_microbatch: called with True before the
    last backward of each stage, with False after it and at the start of a pack; once with True if there is no microbatch. record: keep
    the times of each pack for `timeline`. parts: this rank's parts of sequences, if they are cut.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        context: DistributedContext,
        programs: ProgramCache,
        group: ProcessGroup,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        first_trainable: int = 0,
        begin_microbatch: Callable[[bool], None] | None = None,
        record: bool = False,
        parts: SequenceParts | None = None,
    ) -> None:
        import torch.distributed as dist

        self._stages = {stage.index: stage for stage in stages}
        self._context, self._programs, self._first_trainable = context, programs, first_trainable
        self.begin_microbatch, self.record, self._parts = begin_microbatch, record, parts
        self._autocast, self._place, self._layout = autocast, dist.get_rank(group), programs.layout
        self._check_stages(dist.get_world_size(group))
        self._transport = Transport(group, context.device)
        self._check = PackCheck(context, self._transport, self._layout.num_stages)
        self._totals, self._starts = RankWeights(context), LossStarts(several=True)
        self._in_lockstep = context.forwards_meet or any(stage.sync is not None for stage in stages)
        self._recorder: Recorder | None = None
        self._num_recorded = 0  # microbatches
        self.peak_activations = 0  # of the last pack

    def _check_stages(self, num_ranks: int) -> None:
        layout, mine = self._layout, self._layout.stages_of(self._place)
        if num_ranks != layout.num_ranks or tuple(sorted(self._stages)) != mine:
            raise ConfigurationError(
                f"rank {self._context.rank} is number {self._place} of {num_ranks} in its pipeline and has the stages "
                f"{sorted(self._stages)}, but the schedule has {layout.num_ranks} ranks and puts the stages {list(mine)} here"
            )
        if layout != self._context.stage_layout:
            raise ConfigurationError(
                f"the programs are for {layout}, but MeshStrategy has {self._context.stage_layout}; give both the same schedule"
            )
        for stage in self._stages.values() if layout.num_stages > 1 else ():
            check_describes_transfers(stage.module, f"stage {stage.index} on rank {self._context.rank}")
        if self._programs.schedule.splits_backward and any(stage.sync is not None for stage in self._stages.values()):
            raise ConfigurationError(
                f"the schedule {self._programs.schedule.name!r} computes gradients of weights apart, so FSDP can't reduce them in each "
                "microbatch; set fsdp_sync='pack' of MeshStrategy, or choose a schedule that does not split, such as '1f1b'"
            )

    def begin_training(self, first_trainable: int) -> None:
        """Once it is known what is trained: see the class."""
        self._first_trainable = first_trainable

    @property
    def fsdp_sync(self) -> StagesSync | None:
        """What `Gradients(sync=...)` gets: FSDP's part of the synchronisation; None without FSDP units."""
        sync = StagesSync(self._stages.values())
        return sync if sync.units else None

    @property
    def hosts_last_stage(self) -> bool:
        """Whether losses, metrics and predictions come from this rank."""
        return self._context.hosts_last_stage

    def run_pack(
        self,
        pack: Pack,
        task: Task,
        metrics: dict[str, Metric],
        *,
        losses: LossSums | None,
        on_microbatch: Callable[[int, torch.Tensor | None], None] | None = None,
    ) -> Weight:
        """Forward and backward of every microbatch; gradients accumulate. Returns the weight by which to divide them, on every rank.

        losses: where this rank adds the losses that it has, if they are wanted. on_microbatch: called with (index, loss or None) after each
        backward of the last stage, where that is.
        """
        inputs, weights, counting = pack_inputs(task, pack.microbatches, self._parts)
        microbatches = self._arrange(pack, task, inputs, counting)
        self._begin(microbatches)
        self._totals.begin(weights)
        self._totals.before_backward()
        outcome = TrainingOutcome(
            task, weights, metrics, losses, self._starts, _only_first(on_microbatch, len(inputs)), in_lockstep=self._in_lockstep
        )
        program = self._program(self._programs.training, len(microbatches))
        if self.begin_microbatch is not None:
            self.begin_microbatch(program is None)
        self._run(program, microbatches, outcome)
        sizes = [batch_size(microbatch) for microbatch in pack.microbatches] if weights.assumed else []
        total = self._totals.finish([size for size in sizes if size is not None])
        if self._totals.sizes_differ and self._context.is_counted and self._context.loss_rank == 0:  # one rank that has losses
            self._starts.warn_of_sizes(sizes)
        return total

    def evaluate_pack(self, pack: Pack, task: Task, metrics: dict[str, Metric], losses: LossSums) -> None:
        """Forward, loss and metrics of every microbatch, without a graph; each rank adds what it has."""
        found = [pack_inputs(task, [microbatch], self._parts) for microbatch in pack.microbatches]
        inputs = [given for (given,), _, _ in found]
        weights = {index: of_one for index, (_, of_one, _) in enumerate(found)}
        counting = [index for index, (_, _, counts) in enumerate(found) if counts]
        self._run_forwards(self._arrange(pack, task, inputs, counting), EvaluationOutcome(task, weights, metrics, losses))

    def predict_pack(self, pack: Pack, task: Task) -> Iterator[Any]:
        """What `task.process_outputs` makes of each microbatch, in order, on the rank of the last stage; nothing on the others."""
        inputs = [cut_inputs(task, forward_inputs(task, microbatch), self._parts) for microbatch in pack.microbatches]
        outcome = PredictionOutcome(task, self._parts)
        self._run_forwards(self._arrange(pack, task, inputs, range(len(inputs))), outcome)
        for index in sorted(outcome.found):
            yield outcome.found.pop(index)

    def timeline(self) -> Timeline:
        """When each rank of this pipeline computed what in the last pack. A collective of the world."""
        if self._recorder is None:
            raise StateError("no pack was recorded; set record=True of the PipelineRunner before one runs")
        return self._recorder.timeline(self._transport.ranks)

    def drawing(self) -> Drawing:
        """The timeline of the last pack, below that of a simulation in which its parts take their mean times. A collective of the world."""
        timeline = self.timeline()
        program = self._programs.training(self._num_recorded)
        return program.draw(Costs.measured(timeline, self._layout.num_stages), measured=timeline)

    def _arrange(self, pack: Pack, task: Task, inputs: Sequence[ForwardInputs], counting: Sequence[int]) -> list[Microbatch]:
        """All microbatches that every rank runs: real ones at their places, and what does not count filled up with one that does.

        counting: the places of those that count, rising.
        """
        num_all = max(pack.num_on_all or 0, len(inputs))
        if len(counting) == len(inputs) == num_all:
            return self._described([Microbatch(given, True) for given in inputs])
        filler = inputs[counting[-1]] if counting else filler_inputs(pack, task, self._context.device, self._parts)
        real = {index: Microbatch(inputs[index], True) for index in counting}
        return self._described([real.get(index) or Microbatch(filler, False) for index in range(num_all)])

    def _described(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """With what the stages say of their transfers."""
        last = self._layout.num_stages - 1
        for index, microbatch in enumerate(microbatches):
            inputs = microbatch.given.inputs
            for number, stage in self._stages.items():
                try:
                    if number > 0:
                        microbatch.incoming[number] = transfer_spec(stage.module, inputs, "incoming")
                    if number < last:
                        microbatch.outgoing[number] = transfer_spec(stage.module, inputs, "outgoing")
                except Exception as error:
                    error.add_note(f"in stage_transfer_spec of stage {number} on rank {self._context.rank}, for microbatch {index}")
                    raise
        return microbatches

    def _begin(self, microbatches: Sequence[Microbatch]) -> None:
        self._check.start(len(microbatches), [each.incoming for each in microbatches], [each.outgoing for each in microbatches])
        self._recorder, self._num_recorded = Recorder(self._context) if self.record else None, len(microbatches)

    def _run_forwards(self, microbatches: list[Microbatch], outcome: Outcome) -> None:
        self._begin(microbatches)
        self._run(self._program(self._programs.forward_only, len(microbatches)), microbatches, outcome)

    def _program(self, build: Callable[[int], Program], num_microbatches: int) -> Program | None:
        """The program for so many microbatches; None without any. If the ranks have different numbers, that is what is wrong."""
        try:
            return build(num_microbatches) if num_microbatches else None
        except ConfigurationError:
            self._check.finish()
            raise

    def _run(self, program: Program | None, microbatches: Sequence[Microbatch], outcome: Outcome) -> None:
        if program is None:
            self._check.finish()
            self._transport.finish()
            return
        passes = {number: self._passes(stage, len(microbatches), program.trains) for number, stage in self._stages.items()}
        around = Surroundings(
            self._context, self._place, self._transport, self._check, self._autocast, self.begin_microbatch if program.trains else None
        )
        run = PackRun(around, program, passes, microbatches, outcome, self._recorder)
        try:
            run.run()
        finally:
            self.peak_activations = run.peak

    def _passes(self, stage: Stage, num_microbatches: int, trains: bool) -> StagePasses:
        if trains and stage.sync is not None:
            stage.sync.begin_microbatch(False)
        return StagePasses(
            stage,
            num_microbatches,
            trains=trains and stage.index >= self._first_trainable,
            wants_gradient=trains and stage.index > self._first_trainable,
        )


def _only_first(
    on_microbatch: Callable[[int, torch.Tensor | None], None] | None, number: int
) -> Callable[[int, torch.Tensor | None], None] | None:
    """Those that follow only fill up, and are not told of."""
    if on_microbatch is None:
        return None
    return lambda index, loss: on_microbatch(index, loss) if index < number else None
