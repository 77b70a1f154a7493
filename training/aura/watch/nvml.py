"""The GPUs of this machine, by NVIDIA's library (the nvidia-ml-py bindings of NVML)."""

from __future__ import annotations

from typing import Any

import pynvml

from aura.check.monitor import ask
from aura.watch.readings import GpuReading


class Gpus:
    """`reason`: why there are none. `answered`: the driver has, once; until then nobody knows which cards there are. A
    card keeps its UUID here when it does not say it any more."""

    def __init__(self) -> None:
        self.reason = ""
        self.known: dict[int, GpuReading] = {}
        self.answered = False

    def read(self) -> list[GpuReading]:
        try:
            if not self.answered:
                pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self.answered = True
        except pynvml.NVMLError as error:
            self.reason = str(error)
            return [_lost(gpu, error) for gpu in self.known.values()]
        self.reason = ""
        return [reading for index in range(count) if (reading := self._read(index))]

    def _read(self, index: int) -> GpuReading | None:
        try:
            reading = _read(index)
        except pynvml.NVMLError as error:
            return _lost(self.known[index], error) if index in self.known else None
        self.known[index] = reading
        return reading


def _lost(gpu: GpuReading, error: pynvml.NVMLError) -> GpuReading:
    return GpuReading(gpu.uuid, gpu.index, gpu.name, gpu.pci, lost=str(error))


def _read(index: int) -> GpuReading:
    """Raises NVMLError where the card does not answer."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    pci = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    load = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    remapped = ask(pynvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
    temperature = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    slowdown_at, shutdown_at = _limits(handle, temperature)
    return GpuReading(
        uuid,
        index,
        name,
        pci="" if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}",
        recovery_action=_field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),  # from driver 570 on
        ecc=ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        temperature=temperature,
        slowdown_at=slowdown_at,
        shutdown_at=shutdown_at,
        # Drivers before 535 know it by this name, and later ones still do.
        throttle=ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        load=None if load is None else load.gpu,
    )


def _limits(handle: Any, temperature: int | None) -> tuple[int | None, int | None]:
    """At which °C it slows down, and switches itself off. From Ada (RTX 40) on a card counts down to a limit of its own
    (its margin), and says at how much of that either happens (-2 and -7, say); the older question has no answer there.
    """
    margin = ask(pynvml.nvmlDeviceGetMarginTemperature, handle)
    old = (pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
    new = (pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT)
    slowdown, shutdown = (
        temperature + margin - left
        if temperature is not None and margin is not None and (left := _field(handle, field)) is not None
        else ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, threshold) or None  # some say 0 for none
        for field, threshold in zip(new, old, strict=True)
    )
    return slowdown, shutdown


def _field(handle: Any, field: int) -> int | None:
    values = ask(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(values[0].value.siVal)
