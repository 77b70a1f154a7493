"""What a rank prints. The lines that the guides show are Spanish, in exactly their form."""

from __future__ import annotations

from aura.config import TrainConfig


class Console:
    """Prints every line at once (journald shows it without delay), headed by who speaks."""

    def __init__(self, rank: int, world_size: int, node: str, device: str) -> None:
        self.head = f"[Rank {rank}/{world_size} | Node {node} | Device {device}]"

    def say(self, text: str) -> None:
        print(f"{self.head} {text}", flush=True)


def distributed(backend: str) -> str:
    return f"Modo Distribuido. Backend={backend}. Sincronizando..."


def alone() -> str:
    return "Un solo proceso: no hay nada que sincronizar."


def model(config: TrainConfig) -> str:
    return (
        f"Config personalizada '{config.preset}': d_model={config.d_model}, layers={config.layers}, "
        f"heads={config.heads}, seq_len={config.seq_len}"
    )


def precision(name: str) -> str:
    def on(state: bool) -> str:
        return "ON" if state else "OFF"

    return f"Precisión activa: {name} | Autocast={on(name != 'fp32')} | GradScaler={on(name == 'fp16')}"


def step(epoch: int, number: int, loss: float, sync: str) -> str:
    return f"Epoch {epoch} | Step {number} | Loss: {loss:.4f} | Sync={sync}"


def epoch(number: int, epochs: int, train_loss: float, validation_loss: float, seconds: float) -> str:
    return (
        f"Epoch {number}/{epochs} | Loss entrenamiento: {train_loss:.4f} | Loss validación: {validation_loss:.4f} | "
        f"Duración epoch: {seconds:.1f}s"
    )


def completed(ranks_compared: bool) -> str:
    return "Entrenamiento completado." + (" Gradientes sincronizados." if ranks_compared else "")


def saved(name: str, stall: float, seconds: float) -> str:
    return f"Guardado {name}: el entrenamiento esperó {stall:.2f} s, escribirlo tomó {seconds:.1f} s"
