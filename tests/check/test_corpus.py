"""Which node makes a corpus of a trained model and dialogues: what the role reads of each, and whom it takes."""

import subprocess
from pathlib import Path

import pytest
from expressions import filled_in, loaded, says

HOME = "/var/lib/aura"


def read_progress(place: Path, paths: list[str]) -> str:
    """What the role's task prints on a node that has these below /var/lib/aura."""
    for path in paths:
        (place / path).mkdir(parents=True)
    task = loaded("roles/corpus/tasks/dialogues.yml")[0]
    known = {"corpus_run": "a", "__corpus_directory": f"{HOME}/corpora/a-tuned"}
    script = filled_in(task["ansible.builtin.shell"], known).replace(HOME, str(place))
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("steps", "with_corpus", "maker"),
    [
        ({"node0": [], "node1": []}, [], ""),
        ({"node0": [], "node1": ["checkpoint-step-40"]}, [], "node1"),
        ({"node0": ["checkpoint-step-80"], "node1": ["interrupt-step-100"]}, [], "node1"),
        ({"node0": ["checkpoint-step-8", "checkpoint-step-80"], "node1": ["checkpoint-step-9"]}, [], "node0"),
        ({"node0": ["checkpoint-step-80"], "node1": ["checkpoint-step-80"]}, [], "node0"),
        # What a save has left that was killed.
        ({"node0": ["checkpoint-step-80"], "node1": ["checkpoint-step-40.tmp-4242"]}, [], "node0"),
        ({"node0": ["checkpoint-step-80"], "node1": ["checkpoint-step-40"]}, ["node1"], "node1"),
        ({"node0": ["checkpoint-step-80"], "node1": []}, ["node1"], "node0"),
    ],
)
def test_the_one_with_the_corpus_or_else_the_farthest(
    steps: dict[str, list[str]], with_corpus: list[str], maker: str, tmp_path: Path
) -> None:
    hosts = {}
    for node, names in steps.items():
        paths = [f"runs/a/checkpoints/{name}" for name in names]
        paths += ["corpora/a-tuned/meta.json"] if node in with_corpus else []
        progress = {"stdout": read_progress(tmp_path / node, paths)}
        hosts[node] = {"inventory_hostname": node, "__corpus_progress": progress}
    assert says("corpus", "__corpus_maker", hostvars=hosts, ansible_play_hosts_all=list(steps)) == maker
