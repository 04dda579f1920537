"""The stages of this rank, built, and the runner over them: one stage runs its microbatches in turn, several ranks run a pipeline.

Not here: how a single stage is built (`model/`), the programs and the runtime of a pipeline (`pipeline/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_kit.environment import InputsAs, make_autocast
from trainer_kit.exceptions import CheckpointError, ConfigurationError, ModelError, UnsupportedError
from trainer_kit.mesh.team import Team
from trainer_kit.model import ModelCaller, StageContext, StageInfo, build_stage
from trainer_kit.model.transforms import checkpoint_activations, compile_blocks, unmatched
from trainer_kit.parameters import ParameterTable
from trainer_kit.pipeline import PackRunner, SequentialRunner
from trainer_kit.pipeline.transfer_spec import check_describes_transfers
from trainer_kit.ties import TiedWeights
from trainer_kit.torch_private import written_class
from trainer_kit.weights.loading import StageLoad, load_stages
from trainer_kit.weights.stages import stage_state

if TYPE_CHECKING:
    from trainer_kit.config import TrainerConfig
    from trainer_kit.gradients import Gradients
    from trainer_kit.gradients.synchroniser import MicrobatchSync
    from trainer_kit.mesh import DistributedContext
    from trainer_kit.model import ModelProvider
    from trainer_kit.parallel import SequenceParts
    from trainer_kit.pipeline.runtime import PipelineRunner


@dataclass
class BuiltModel:
    """The stages of this rank, ready to be called. fsdp_sync: FSDP's part of the synchronisation of gradients; None: there is none."""

    stages: list[nn.Module]
    contexts: list[StageContext]
    table: ParameterTable
    ties: TiedWeights
    runner: PackRunner
    fsdp_sync: MicrobatchSync | None

    @property
    def pipeline(self) -> PipelineRunner | None:
        """The runner, if it is one of a pipeline."""
        return None if isinstance(self.runner, SequentialRunner) else self.runner  # type: ignore[return-value]

    def connect(self, gradients: Gradients) -> None:
        """Let the runner tell the gradients of its microbatches; what is trainable does not change from now on."""
        self.runner.begin_microbatch = gradients.begin_microbatch
        if self.pipeline is not None:
            self.pipeline.begin_training(min(entry.stages[0] for entry in self.table.entries if entry.is_trainable))


def build_model(provider: ModelProvider, config: TrainerConfig, context: DistributedContext) -> BuiltModel:
    """Build, initialise and load the stages of this rank. A collective."""
    num_stages = context.stage_layout.num_stages
    contexts = [StageContext(context, StageInfo(index, num_stages)) for index in context.stages]
    for ctx in contexts:
        dtype = torch.bfloat16 if config.precision == "bf16" else None
        ctx.module = build_stage(provider, context, ctx.stage, seed=config.seed, dtype=dtype)
    modules = [ctx.built() for ctx in contexts]
    parts = _sequence_parts(modules, config, context)
    table = Team.of(context).everywhere(lambda: _table_of(modules, context))
    table.join(context)
    ties = TiedWeights(table.rows, context)
    _give_values(provider, config, contexts, table, ties)
    _transform(modules, config, context)
    if context.world_size > 1:
        table.check_contracts(context.dense_sizes())
        _check_experts(modules, table, context)
    if context.num_pipeline_ranks > 1:
        pipeline = _pipeline_runner(modules, config, context, parts)
        return BuiltModel(modules, contexts, table, ties, pipeline, pipeline.fsdp_sync)
    sync = _fsdp_sync(modules[0], context)
    runner = SequentialRunner(
        _caller(modules[0], config),
        context,
        autocast=make_autocast(config.precision, context.device),
        lockstep=sync is not None or context.forwards_meet,
        modules=modules,
        parts=parts,
    )
    return BuiltModel(modules, contexts, table, ties, runner, sync)


def _check_experts(modules: list[nn.Module], table: ParameterTable, context: DistributedContext) -> None:
    """Raise ConfigurationError if nothing of the whole model is cut over `ep`."""
    if context.strategy.ep > 1 and not any("ep" in entry.cut[0] for entry in table.entries):
        raise ConfigurationError(
            f"ep={context.strategy.ep} of MeshStrategy has no effect: {written_class(modules[0]).__name__} has no experts that are shared "
            "out. Give the model a method expert_modules(self) that returns its layers of experts, call "
            "trainer_kit.parallel.parallelize_expert for them in parallelize_model_stage, or set ep=1"
        )


def _table_of(modules: list[nn.Module], context: DistributedContext) -> ParameterTable:
    """The table of the stages of this rank. Raises ModelError for one that no pipeline could run."""
    num_stages = context.stage_layout.num_stages
    for index, module in zip(context.stages, modules, strict=True) if num_stages > 1 else ():
        where = f"stage {index} of {num_stages} on rank {context.rank}"
        check_describes_transfers(module, where)
        if not any(True for _ in module.parameters()):
            raise ModelError(
                f"{where} has no parameters; use fewer stages (pp or stages_per_rank of MeshStrategy), or give each stage a layer "
                "(trainer_kit.model.distribute_layers)"
            )
    return ParameterTable(modules, indices=context.stages, num_stages=num_stages)


def _transform(modules: list[nn.Module], config: TrainerConfig, context: DistributedContext) -> None:
    """Recompute and compile as the settings ask for. A stage of several need not have what they name, but one of them must."""
    wanted, is_whole = config.activation_checkpointing, context.stage_layout.num_stages == 1
    if not is_whole and wanted:
        everywhere = Team.of(context).exchange([unmatched(module, wanted) for module in modules])
        of_stages = [problems for of_rank in everywhere for problems in of_rank]
        if problems := [text for text in of_stages[0] if all(text in problems for problems in of_stages)]:
            raise ConfigurationError(problems[0])
    for module in modules:
        checkpoint_activations(module, wanted, is_whole=is_whole)
        compile_blocks(module, config.compile)


def _give_values(
    provider: ModelProvider, config: TrainerConfig, contexts: list[StageContext], table: ParameterTable, ties: TiedWeights
) -> None:
    """Load the stored model state, if there is one, and make weights that several stages hold the same."""
    path, context = config.source_model, contexts[0].context
    if path is None:
        ties.share_values()
        return

    def parts() -> list[StageLoad]:
        return [
            StageLoad(
                provider.load_mapper(ctx),
                stage_state(table, ctx.stage.index),
                tuple(provider.may_be_missing(ctx)),
                tuple(provider.may_be_unused(ctx)),
            )
            for ctx in contexts
        ]

    report, given = load_stages(path, parts, context)
    if context.is_main and (report.missing or report.unexpected):
        context.logger.info(
            "loaded %s; allowed by the model provider: %s keep their initial values, and %s in the files have no use",
            path,
            _few(report.missing),
            _few(report.unexpected),
        )
    differing = {name for of_rank in Team.of(context).exchange(ties.share_values(given)) for name in of_rank}
    if differing:
        name = min(differing)
        raise CheckpointError(
            f"{path} holds different values for the copies of the tied weight {name!r} in the stages {', '.join(map(str, given[name]))}; "
            "untie the model, or remove all but one from the files"
        )


def _few(names: Sequence[str], limit: int = 5) -> str:
    return (", ".join(names[:limit]) or "none") + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _sequence_parts(modules: list[nn.Module], config: TrainerConfig, context: DistributedContext) -> SequenceParts | None:
    """This rank's parts of sequences, if they are cut. Raises UnsupportedError for a model that was not told of it."""
    if context.num_context_ranks == 1:
        return None
    from trainer_kit.parallel.context import SequenceParts, works_on_parts

    parts = SequenceParts.of(context)
    if config.compile:
        raise UnsupportedError(f"compile={config.compile!r} is not there yet for sequences that are cut over cp ranks; leave it out")
    if parts is not None and not all(map(works_on_parts, modules)):
        raise UnsupportedError(
            f"cp={parts.num_ranks} of MeshStrategy cuts sequences, but the model was built for whole ones; call "
            "trainer_kit.parallel.parallelize_context in parallelize_model_stage, or set cp_shard=1 and cp_replicate=1"
        )
    return parts


def _caller(module: nn.Module, config: TrainerConfig) -> Callable[[Any, Any], Any]:
    caller = ModelCaller(module)
    return InputsAs(torch.bfloat16, caller) if config.precision == "bf16" else caller


def _fsdp_sync(module: nn.Module, context: DistributedContext) -> MicrobatchSync | None:
    if context.world_size == 1:
        return None
    from trainer_kit.parallel import FSDPSync, fsdp_units

    units = fsdp_units(module)
    return FSDPSync(units, context.strategy.fsdp_sync) if units else None


def _pipeline_runner(
    modules: list[nn.Module], config: TrainerConfig, context: DistributedContext, parts: SequenceParts | None
) -> PipelineRunner:
    from trainer_kit.parallel import FSDPSync, fsdp_units
    from trainer_kit.pipeline.building import ProgramCache
    from trainer_kit.pipeline.runtime import PipelineRunner
    from trainer_kit.pipeline.sharded_stage import ShardedStage
    from trainer_kit.pipeline.stage import Stage

    strategy, group = context.strategy, context.pipeline_group
    assert group is not None
    units = {index: fsdp_units(module) for index, module in zip(context.stages, modules, strict=True)}
    per_pack = strategy.fsdp_sync == "pack"
    sharded = {index for found in context.host.exchange([i for i, of_stage in units.items() if of_stage]) for index in found}
    stages = [
        Stage(
            index,
            module,
            _caller(module, config),
            sharded=ShardedStage(units[index]) if units[index] and per_pack else None,
            sync=FSDPSync(units[index], "microbatch") if units[index] and not per_pack else None,
            # The backward of inputs alone would compute activations twice, and compiled graphs come whole.
            splits=not (config.activation_checkpointing or config.compile),
        )
        for index, module in zip(context.stages, modules, strict=True)
    ]
    programs = ProgramCache(
        strategy.schedule,
        context.num_pipeline_ranks,
        stages_per_rank=context.stage_layout.stages_per_rank,
        sharded_stages=sharded if per_pack else (),
        receive_ahead=1 if context.device.type == "cpu" else 0,  # NCCL runs the two directions between two ranks in one order
    )
    return PipelineRunner(stages, context, programs, group, autocast=make_autocast(config.precision, context.device), parts=parts)
