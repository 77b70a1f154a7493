"""The GPU's streams of the wire's threads, so that what comes does not queue up behind a backward pass. On a CPU all of
this is nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Streams:
    def __init__(self, device: torch.device, wire: torch.device, communicators: int) -> None:
        """device: of the parameters. wire: from where the wire takes its tensors. One stream for each communicator:
        if they shared one, what a communicator waits for could stand in it behind what waits for this communicator."""
        self.wire = wire
        self.device = device
        self.of_lanes: list[torch.Stream] = []
        if device.type != "cpu":
            self.of_lanes = [torch.Stream(device) for _ in range(communicators)]

    def prepare_thread(self, communicator: int) -> None:
        torch.set_grad_enabled(False)
        if self.of_lanes:
            torch.accelerator.set_stream(self.of_lanes[communicator])

    def on_the_wire(self, packed: Tensor, communicator: int) -> Callable[[], Tensor]:
        """It, on the device that the wire takes it from; the function, for the thread of the communicator, waits for
        it."""
        if not self.of_lanes or packed.is_cpu:
            return lambda: packed
        if self.wire.type == "cpu":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed = host.copy_(packed, non_blocking=True)
        else:
            packed.record_stream(self.of_lanes[communicator])
        there = torch.Event(self.device)
        there.record()

        def wait() -> Tensor:
            if packed.is_cpu:
                there.synchronize()
            else:
                there.wait()
            return packed

        return wait

    def wait_for_current(self) -> None:
        """The threads may use what has been asked for until now."""
        for stream in self.of_lanes:
            stream.wait_stream(torch.accelerator.current_stream())

    def used_by_current(self, tensor: Tensor) -> None:
        """Its memory, which a thread has allocated, stays until what is asked for from now on is done."""
        if not tensor.is_cpu:
            tensor.record_stream(torch.accelerator.current_stream())

    def finish(self) -> None:
        """What the threads have done may be used."""
        for stream in self.of_lanes:
            torch.accelerator.current_stream().wait_stream(stream)
