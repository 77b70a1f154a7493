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
    return GpuReading(
        uuid,
        index,
        name,
        pci="" if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}",
        recovery_action=_recovery_action(handle),
        ecc=ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        temperature=ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        slowdown_at=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        shutdown_at=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        # Drivers before 535 know it by this name, and later ones still do.
        throttle=ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        load=None if load is None else load.gpu,
    )


def _threshold(handle: Any, which: int) -> int | None:
    return ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, which) or None  # some say 0 for none


def _recovery_action(handle: Any) -> int | None:
    """From driver 570 on."""
    values = ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)
