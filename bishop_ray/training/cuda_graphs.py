"""A training step captured as one CUDA graph.

Not measured on a GPU by this project yet, so nobody gets it without asking (`TrainConfig.cuda_graphs`).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from bishop_ray.training.device_table import Resident
from bishop_ray.training.micro_batch import Passes
from bishop_ray.training.optimizer import Stepper

WARM_UP = 3
logger = logging.getLogger(__name__)


class GraphedStep:
    """Does whole batches by replaying a captured step; leaves to the caller what cannot be captured.

    The first `WARM_UP` steps run on a side stream, as capturing asks for; they are steps like any other. Batches of
    another size, and all batches once capturing failed (a network that asks the device for a value, too little
    memory), are the caller's.

    Args:
        passes: On a CUDA device, in one process.
        stepper: Of the same network; its learning rates become tensors, which a replay reads anew.
        data: The training rows.
        batch_size: Rows of the batches that are captured.
    """

    def __init__(self, passes: Passes, stepper: Stepper, data: Resident, batch_size: int) -> None:
        self._passes, self._stepper, self._data = passes, stepper, data
        self._index = torch.zeros(batch_size, dtype=torch.int64, device=data.y.device)
        self._warm, self._possible = 0, True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None
        for group in stepper.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=data.y.device)
            group["capturable"] = True

    def __call__(self, index: Tensor) -> Tensor | None:
        """One step over the rows of `index` (B,): the batch's loss, or None where the caller must do it."""
        if not self._possible or len(index) != len(self._index) or self._passes.micro_batch:
            return None
        self._index.copy_(index)
        if self._graph is None:
            try:
                if self._warm < WARM_UP:
                    return self._warm_up()
                self._capture()
            except RuntimeError as error:
                self._possible, self._graph = False, None
                logger.warning("no CUDA graph: %s", (str(error).splitlines() or [""])[0])
            if not self._possible:
                for parameter in self._passes.network.parameters():
                    parameter.grad = None
                return None
        assert self._graph is not None
        self._graph.replay()
        return self._loss

    def _warm_up(self) -> Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._warm += 1
        return loss

    def _capture(self) -> None:
        """Records a step; nothing is computed by it."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._step()
        self._graph = graph

    def _step(self) -> Tensor:
        loss = self._passes.attempt(self._data, self._index, 1.0)
        self._stepper.step()
        return loss
