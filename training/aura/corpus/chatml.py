"""ChatML: how a dialogue is written down as text, exactly as Qwen's models, llama.cpp and ollama know it.

<|im_start|>user
¿Qué hora es?<|im_end|>
<|im_start|>assistant
Las tres.<|im_end|>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BEGIN, END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
# For transformers and llama.cpp: what `written` and `question` make.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Message = Mapping[str, str]  # role and content


def opened(role: str) -> str:
    return f"{BEGIN}{role}\n"


def written(messages: Iterable[Message]) -> str:
    return "".join(f"{opened(each['role'])}{each['content']}{END}\n" for each in messages)


def question(messages: Iterable[Message]) -> str:
    """What the model goes on behind: its answer ends with END."""
    return written(messages) + opened("assistant")
