"""Which node makes a corpus of a trained model and dialogues."""

import pytest
import tree

RUN, CORPUS = "/var/lib/aura/runs/a/checkpoints", "/var/lib/aura/corpora/a-tuned/meta.json"
who_prepares = tree.module("roles/corpus/filter_plugins/who_prepares.py").who_prepares


@pytest.mark.parametrize(
    ("found", "node"),
    [
        ({"node0": "", "node1": ""}, ""),
        ({"node0": RUN, "node1": f"{RUN}\n{RUN}/checkpoint-step-40"}, "node1"),
        ({"node0": f"{RUN}/checkpoint-step-80", "node1": f"{RUN}/interrupt-step-100"}, "node1"),
        ({"node0": f"{RUN}/checkpoint-step-80", "node1": f"{RUN}/checkpoint-step-80"}, "node0"),
        # What a save has left that was killed says a process, not a step.
        ({"node0": f"{RUN}/checkpoint-step-80", "node1": f"{RUN}/checkpoint-step-40.tmp-4242"}, "node0"),
        ({"node0": f"{RUN}/checkpoint-step-80", "node1": f"{RUN}/checkpoint-step-40\n{CORPUS}"}, "node1"),
        ({"node0": f"{RUN}/checkpoint-step-80", "node1": CORPUS}, "node0"),
    ],
)
def test_the_one_with_the_corpus_or_else_the_farthest(found: dict[str, str], node: str) -> None:
    assert who_prepares(found) == node
