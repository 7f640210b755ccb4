"""Weights from trainers to generators: versions that are read one-sided, never torn.

    publisher = WeightPublisher(model)                 # in the trainer; publish() after each step
    subscriber = WeightSubscriber(handle, my_model)    # in each generator; sync() when it wants to

See `docs/guide/rdma.md`. `monarch.weights.reshard` moves weights between different shardings.
"""

from monarch.weights._actors import WeightSink, WeightSource, broadcast, push
from monarch.weights._errors import LayoutMismatch, WeightsLapped
from monarch.weights._layout import WeightLayout
from monarch.weights._publisher import WeightHandle, WeightPublisher
from monarch.weights._subscriber import WeightSubscriber

__all__ = [
    "LayoutMismatch",
    "WeightHandle",
    "WeightLayout",
    "WeightPublisher",
    "WeightSink",
    "WeightSource",
    "WeightSubscriber",
    "WeightsLapped",
    "broadcast",
    "push",
]
