"""The plan's part of the console's catalogue: what `aura plan`, a launch and `auto` say before a run."""

from __future__ import annotations

# key: (Spanish, English)
PLAN_TEXTS = {
    # Names of rows
    "plan_preset": ("preset", "preset"),
    "plan_on": ("en", "on"),
    "plan_memory_of_a_rank": ("memoria de un rank", "memory of a rank"),
    "plan_memory_of_rank": ("memoria del rank {rank}", "memory of rank {rank}"),
    "plan_batch": ("batch efectivo", "effective batch"),
    "plan_work": ("cálculo", "work"),
    "plan_step": ("tiempo de un paso", "time of a step"),
    "plan_communication": ("comunicación de un paso", "communication of a step"),
    "plan_checkpoints": ("checkpoints", "checkpoints"),
    "plan_run": ("entrenamiento", "run"),
    "plan_passes": ("pasadas por el corpus", "passes over the corpus"),
    "plan_tokens_per_parameter": ("tokens por parámetro", "tokens per parameter"),
    # The components of aura/plan/memory.py
    "memory_parameters": ("parámetros", "parameters"),
    "memory_gradients": ("gradientes", "gradients"),
    "memory_moments": ("momentos", "moments"),
    "memory_weight_copies": ("copias de los pesos", "weight copies"),
    "memory_activations": ("activaciones", "activations"),
    "memory_logits": ("logits", "logits"),
    "memory_workspace": ("trabajo", "workspace"),
    "memory_context": ("contexto", "context"),
    # Values of rows
    "plan_model": ("{preset}, {parameters:,} parámetros", "{preset}, {parameters:,} parameters"),
    "plan_devices": (
        "{nodes} nodo(s), {ranks} rank(s), {device}",
        "{nodes} node(s), {ranks} rank(s), {device}",
    ),
    "plan_room": (
        "{needs} de {room}, en su máximo ({moment})",
        "{needs} of {room}, at its highest ({moment})",
    ),
    "plan_assumed_part": ("{size} (supuesto)", "{size} (assumed)"),
    "plan_tokens_of_a_step": (
        "{sequences:,} secuencias = {tokens:,} tokens por paso del optimizador",
        "{sequences:,} sequences = {tokens:,} tokens per optimizer step",
    ),
    "plan_flops": (
        "{flops:.3g} GFLOP por token (6 N + 12 layers d_model seq_len)",
        "{flops:.3g} GFLOP per token (6 N + 12 layers d_model seq_len)",
    ),
    "plan_parts_of_a_step": (
        "{step} = {compute} calculando + {communication} comunicando",
        "{step} = {compute} computing + {communication} communicating",
    ),
    "plan_traffic": (
        "{sent} por nodo en cada sentido a {link:g} Mbit/s (all-reduce en anillo)",
        "{sent} each way and node at {link:g} Mbit/s (ring all-reduce)",
    ),
    "plan_disk": (
        "{one} cada uno, hasta {count} a la vez: {all} en cada nodo",
        "{one} each, up to {count} at a time: {all} on every node",
    ),
    "plan_length": (
        "{steps:,} pasos, {tokens:,} tokens, {duration}",
        "{steps:,} steps, {tokens:,} tokens, {duration}",
    ),
    "plan_unknown": ("desconocido", "unknown"),
    "plan_unknown_time": ("tiempo desconocido", "unknown time"),
    "plan_days": ("{count:.1f} días", "{count:.1f} days"),
    "plan_hours": ("{count:.1f} horas", "{count:.1f} hours"),
    "plan_minutes": ("{count:.1f} minutos", "{count:.1f} minutes"),
    "plan_seconds": ("{count:.1f} segundos", "{count:.1f} seconds"),
    # Below the rows
    "plan_assumed": ("Supuesto: {sentence}", "Assumed: {sentence}"),
    "plan_note": ("Nota: {sentence}", "Note: {sentence}"),
    "assumed_context": (
        "0.6 GiB de memoria de la GPU para el driver y CUDA; los huecos del allocator de torch no se cuentan.",
        "0.6 GiB of GPU memory for the driver and CUDA; gaps of torch's allocator are not counted.",
    ),
    "assumed_dropout": (
        "Las máscaras del dropout no se cuentan en la memoria.",
        "The masks of dropout are not counted in the memory.",
    ),
    "assumed_speed": (
        "{device}: {teraflops:.3g} TFLOP/s en {precision} ({source}).",
        "{device}: {teraflops:.3g} TFLOP/s in {precision} ({source}).",
    ),
    "assumed_no_overlap": (
        "La comunicación sigue al backward: nada de ella queda oculto detrás del cálculo.",
        "Communication follows the backward pass: nothing of it is hidden behind computing.",
    ),
    "utilisation_given": (
        "De eso se alcanza el {reached:.0%} (--mfu).",
        "{reached:.0%} of that are reached (--mfu).",
    ),
    "utilisation_assumed": (
        "De eso se alcanza el {reached:.0%} ({source}). Una vez medido, --mfu lo dice mejor.",
        "{reached:.0%} of that are reached ({source}). --mfu says it better, once measured.",
    ),
    "utilisation_not_reported": (
        "una conjetura, de esta tarjeta no hay ningún informe",
        "a guess, there is no report for this card",
    ),
    "utilisation_of_cpu": (
        "medido una vez: 0.58 con gpt2-nano, 0.75 con un modelo mayor",
        "measured once: 0.58 with gpt2-nano, 0.75 with a larger model",
    ),
    "utilisation_eager": (
        "sin torch.compile un paso toma 1.85 veces el tiempo (README de nanoGPT)",
        "without torch.compile a step takes 1.85 times as long (nanoGPT's README)",
    ),
    "utilisation_recomputed": (
        "gradient_checkpointing calcula un {again:.0%} más",
        "gradient_checkpointing computes {again:.0%} more",
    ),
    "cpu_measured": ("medido ahora, en fp32", "measured now, in fp32"),
    "cpu_assumed": (
        "supuesto, porque falta numpy para medirlo",
        "assumed, because numpy is not here to measure it",
    ),
    "not_in_the_table": ("no está en la tabla", "not in the table"),
    "note_does_not_fit": ("No cabe en {room}", "It does not fit {room}"),
    "note_rank_does_not_fit": (
        "Rank {rank} ({device}): no cabe en {room}",
        "Rank {rank} ({device}): it does not fit {room}",
    ),
    "note_nothing_fits": (
        "{what}, y ningún ajuste lo remedia: hace falta un modelo menor.",
        "{what}, and no setting makes it fit: take a smaller model.",
    ),
    "note_this_fits": ("{what}. Con esto cabe: {settings}.", "{what}. This would: {settings}."),
    "note_speed_unknown": (
        "La velocidad de {device} no se conoce: --peak-tflops la dice.",
        "The speed of {device} is not known: --peak-tflops says it.",
    ),
    "note_few_tokens": (
        "{ratio:.2g} tokens por parámetro están muy por debajo de {enough} (Hoffmann et al. 2022): con el mismo tiempo "
        "de cálculo un modelo menor aprendería más.",
        "{ratio:.2g} tokens per parameter are far below {enough} (Hoffmann et al. 2022): with the same computing time "
        "a smaller model would learn more.",
    ),
    "note_traffic": (
        "La red toma {times:.1f} veces lo que el cálculo: conviene subir gradient_accumulation_steps (ahora "
        "{accumulation}) o usar menos nodos.",
        "The link takes {times:.1f} times as long as the computing: raise gradient_accumulation_steps (now "
        "{accumulation}), or take fewer nodes.",
    ),
    # After the run
    "predicted": ("Previsto: {what}.", "Predicted: {what}."),
    "predicted_time": (
        "{predicted} por paso, medido {measured} ({difference:+.0%})",
        "{predicted} per step, measured {measured} ({difference:+.0%})",
    ),
    "predicted_no_time": (
        "ningún tiempo por paso, medido {measured}",
        "no time per step, measured {measured}",
    ),
    "predicted_memory": (
        "{predicted} de tensores, medido {measured} ({difference:+.0%})",
        "{predicted} of tensors, measured {measured} ({difference:+.0%})",
    ),
    # auto
    "auto": ("preset=auto: {what}, porque {why}.", "preset=auto: {what}, because {why}."),
    "auto_with": ("{preset} con {settings}", "{preset} with {settings}"),
    "auto_before": (
        "preset=auto: {preset}, como empezó este entrenamiento ({file}).",
        "preset=auto: {preset}, as this run has begun ({file}).",
    ),
    "auto_without_gpu": ("esta máquina no tiene GPU", "this machine has no GPU"),
    "auto_has": ("{gpu} tiene {free:.1f} GiB libres", "{gpu} has {free:.1f} GiB free"),
    "auto_no_bf16": ("{has} y no tiene bf16", "{has} and no bf16"),
    "auto_needs": ("necesita {needs:.1f} GiB y {has}", "it needs {needs:.1f} GiB and {has}"),
    "auto_too_large": (
        "; {preset} necesitaría {needs:.1f} GiB",
        "; {preset} would need {needs:.1f} GiB",
    ),
    "best_gpu": (
        "{gpu}: de {count} GPU, la que tiene más memoria libre. Otra: CUDA_VISIBLE_DEVICES=N. Todas: "
        "aura launch-local.",
        "{gpu}: of {count} GPUs the one with most free memory. Another one: CUDA_VISIBLE_DEVICES=N. All of them: "
        "aura launch-local.",
    ),
}
