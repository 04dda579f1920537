"""Metrics: values that add up over microbatches, steps and ranks, without waiting for the device.

`Metric` is the class to extend; anything with `update`, `compute` and `reset`, such as a torchmetrics metric, works as well.
"""

from trainer_kit.metrics.classification import Accuracy
from trainer_kit.metrics.means import Mean, Perplexity, WeightedMean
from trainer_kit.metrics.metric import Metric, check_metric
from trainer_kit.metrics.totals import Last, Max, Min, Sum

__all__ = ["Accuracy", "Last", "Max", "Mean", "Metric", "Min", "Perplexity", "Sum", "WeightedMean", "check_metric"]
