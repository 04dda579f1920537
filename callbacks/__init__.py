"""The built-in callbacks, one file each. They use the public API of trainer_kit alone.

Importing this package imports neither TensorBoard nor tqdm; each callback imports what it needs when it is used.
"""

from trainer_kit.callbacks.checkpoint import Checkpoint
from trainer_kit.callbacks.csv_file import CSV
from trainer_kit.callbacks.early_stopping import EarlyStopping
from trainer_kit.callbacks.ema import EMA
from trainer_kit.callbacks.evaluate import Evaluate
from trainer_kit.callbacks.garbage_collection import GarbageCollection
from trainer_kit.callbacks.gradient_clipping import GradientClipping
from trainer_kit.callbacks.json_lines import JSONLines
from trainer_kit.callbacks.memory_monitor import MemoryMonitor
from trainer_kit.callbacks.pipeline_timeline import PipelineTimeline
from trainer_kit.callbacks.profiler import Profiler
from trainer_kit.callbacks.progress import Progress
from trainer_kit.callbacks.signals import Signals
from trainer_kit.callbacks.spike_guard import SpikeGuard
from trainer_kit.callbacks.summary import Summary
from trainer_kit.callbacks.tensorboard import TensorBoard
from trainer_kit.callbacks.throughput import Throughput

__all__ = [
    "CSV",
    "EMA",
    "Checkpoint",
    "EarlyStopping",
    "Evaluate",
    "GarbageCollection",
    "GradientClipping",
    "JSONLines",
    "MemoryMonitor",
    "PipelineTimeline",
    "Profiler",
    "Progress",
    "Signals",
    "SpikeGuard",
    "Summary",
    "TensorBoard",
    "Throughput",
]
