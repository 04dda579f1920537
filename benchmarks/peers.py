"""The other libraries of `step_overhead.py`, on the job of `contenders.py`, each with its own loop or the loop its manual shows.

Imported by those who compare; a library that is not installed is left out. Each is set up as lean as its documented switches allow
(no checkpoints, no loggers but the one named), with the loss logged every 50 steps.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from contenders import LOG_EVERY, Job, Stopwatch, as_it_is, make_optimizer
from torch import nn


class Fabric:
    """Lightning Fabric: the loop by hand, with `fabric.backward`."""

    name = "Fabric"
    package = "lightning"

    def __init__(self, job: Job, folder: Path) -> None:
        from lightning.fabric import Fabric as LightningFabric

        self._job = job
        self._fabric = LightningFabric(accelerator="cpu", devices=1)
        model = job.make_model()
        self._model, self._optimizer = self._fabric.setup(model, make_optimizer(model.parameters()))
        self._loader = self._fabric.setup_dataloaders(job.loader())

    def run_round(self, watch: Stopwatch) -> None:
        for step, batch in enumerate(self._loader, start=1):
            loss = self._job.loss(self._model, batch)
            self._fabric.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f}")
            watch.step_done()


class Accelerate:
    """Hugging Face Accelerate: the loop by hand, with `accelerator.backward`."""

    name = "Accelerate"
    package = "accelerate"

    def __init__(self, job: Job, folder: Path) -> None:
        from accelerate import Accelerator

        self._job = job
        self._accelerator = Accelerator(cpu=True)
        model = job.make_model()
        prepared = self._accelerator.prepare(model, make_optimizer(model.parameters()), job.loader())
        self._model, self._optimizer, self._loader = prepared

    def run_round(self, watch: Stopwatch) -> None:
        for step, batch in enumerate(self._loader, start=1):
            loss = self._job.loss(self._model, batch)
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f}")
            watch.step_done()


class Lightning:
    """Lightning's Trainer. with_log: progress bar, and the loss logged to TensorBoard and the bar; else everything off."""

    package = "lightning"

    def __init__(self, job: Job, folder: Path, *, with_log: bool = False) -> None:
        import lightning

        self.name = "Lightning, bar and log" if with_log else "Lightning, bare"
        self._job, self._with_log, self._lightning = job, with_log, lightning
        self._folder = str(folder)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = job.make_model()

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                loss = job.loss(self.model, batch)
                if with_log:
                    self.log("loss", loss, prog_bar=True)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return make_optimizer(self.parameters())

        self._module = Module()

    def run_round(self, watch: Stopwatch) -> None:
        class Ticks(self._lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, *args: Any) -> None:
                watch.step_done()

        logger = False
        if self._with_log:
            from lightning.pytorch.loggers import TensorBoardLogger

            logger = TensorBoardLogger(self._folder)
        trainer = self._lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=logger,
            log_every_n_steps=LOG_EVERY,
            enable_progress_bar=self._with_log,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[Ticks()],
        )
        trainer.fit(self._module, self._job.loader())


class HuggingFace:
    """The Trainer of transformers, without progress bar."""

    name = "Hugging Face Trainer"
    package = "transformers"

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._folder = str(folder)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = job.make_model()

            def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": job.loss(self.model, batch)}

        self._net = Net()
        self._optimizer = make_optimizer(self._net.parameters())

    def run_round(self, watch: Stopwatch) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Ticks(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                watch.step_done()

        arguments = TrainingArguments(
            output_dir=self._folder,
            per_device_train_batch_size=self._job.batch_size,
            num_train_epochs=1,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            self._net,
            arguments,
            data_collator=as_it_is,
            train_dataset=self._job.rows,
            optimizers=(self._optimizer, None),
            callbacks=[Ticks()],
        )
        trainer.train()


def installed_peers(job: Job, folder: Path) -> list[Any]:
    """One of each library that is there, quiet; what they write goes to `folder`."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    kinds: list[Any] = [Fabric, Accelerate, Lightning, functools.partial(Lightning, with_log=True), HuggingFace]
    packages = ["lightning", "accelerate", "lightning", "lightning", "transformers"]
    return [kind(job, folder) for kind, package in zip(kinds, packages, strict=True) if importlib.util.find_spec(package) is not None]
