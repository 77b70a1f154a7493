"""`aura chat`: a conversation with a model that has learnt to answer (`aura tune`)."""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aura.commands.named import add_model, model_asked
from aura.commands.sample import add_choice, check_choice, check_typed, continued, loaded
from aura.corpus import chatml
from aura.corpus.special_tokens import is_tuned, settings_of
from aura.errors import ConfigError, Parser
from aura.model import export, sample
from aura.texts.console import put, text

ROOM = 4  # one of so many parts of the context is for an answer, if it is not limited to less
NEW, EXIT = "/new", "/exit"


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="aura chat",
        description=f"Talk with a tuned model. Ctrl+C ends an answer, {NEW} begins a new conversation, {EXIT} or "
        "Ctrl+D ends. Without a terminal every line of standard input is a question.",
    )
    add_model(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told first (nothing)")
    parser.add_argument("--ask", metavar="TEXT", help="answer this and end")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="longest answer (512)")
    add_choice(parser)
    arguments = parser.parse_args(argv)
    check_choice(arguments)
    check_typed(arguments.system)
    path = model_asked(arguments).path
    check_tuned(path)
    talk = Conversation(loaded(path), arguments)
    if arguments.ask is not None:
        talk.answer(arguments.ask)
        return 0
    for line in _lines():
        if line == EXIT:
            break
        if line == NEW:
            talk.begin()
        elif line:
            try:
                talk.answer(line)
            except ConfigError as error:  # this question is no reason to forget those before
                put(str(error))
    return 0


def check_tuned(path: Path) -> None:
    """Raises ConfigError where a model cannot talk as chatml.py does."""
    special = settings_of(export.tokenizer_of(path).parent)
    if not is_tuned(special):
        raise ConfigError("never_tuned", path=path)
    if chatml.BEGIN not in special["chat_template"]:
        raise ConfigError("other_dialogues", path=path, begin=chatml.BEGIN)


def _lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # one line that is no UTF-8 does not end the others
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    import readline  # noqa: F401 - from now on `input` has the arrow keys

    put(text("chat_begins", new=NEW, exit=EXIT))
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            put("")
            return


@dataclass
class Conversation:
    trained: sample.Trained
    asked: Namespace  # system, tokens and how a token is chosen
    messages: list[chatml.Message] = field(default_factory=list)
    answers: int = 0
    has_forgotten: bool = False

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.messages, self.has_forgotten = [], False
        if self.asked.system:
            self.messages.append({"role": "system", "content": self.asked.system})

    def answer(self, question: str) -> None:
        """Print it while it comes, and remember both. Raises ConfigError for a question too long, or no UTF-8."""
        check_typed(question)
        self.messages.append({"role": "user", "content": question})
        try:
            ids = self._fitting()
        except ConfigError:
            self.messages.pop()
            raise
        trained, asked = self.trained, self.asked
        # Else the same question would be answered alike in each conversation.
        seed = asked.seed + self.answers
        made = continued(trained, ids, min(asked.tokens, trained.model.seq_len - len(ids)), asked, seed)
        said: list[str] = []
        try:
            for piece in sample.pieces(trained.tokenizer, made):
                said.append(piece)
                put(piece, end="")
        except KeyboardInterrupt:
            pass
        put("")
        self.messages.append({"role": "assistant", "content": "".join(said)})
        self.answers += 1

    def _fitting(self) -> list[int]:
        """The ids of the conversation; where it is too long for the model, without its oldest questions and answers."""
        encode = partial(self.trained.tokenizer.encode, add_special_tokens=False)
        limit = self.trained.model.seq_len
        room = min(self.asked.tokens, limit // ROOM)
        kept, oldest = list(self.messages), 1 if self.asked.system else 0
        while len(ids := encode(chatml.question(kept)).ids) + room > limit and len(kept) > oldest + 1:
            del kept[oldest : oldest + 2]
        if len(ids) >= limit:
            raise ConfigError("question_too_long", tokens=len(ids), limit=limit)
        if len(kept) < len(self.messages) and not self.has_forgotten:
            put(text("chat_forgets", tokens=limit))
            self.has_forgotten = True
        self.messages = kept
        return ids
