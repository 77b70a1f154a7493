"""The five virtual nodes as a test sees them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests/lab/lab"
NODES = ["node0", "node1", "node2", "node3", "node4"]
RUNS = "/var/lib/aura/runs"
LONGEST = 560  # seconds of a playbook; a test has 600, and shall be able to say what hung


def copy_repository(folder: Path) -> None:
    """Into a new folder what a clone has, with what is not committed yet."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    copy = [
        "rsync",
        "--archive",
        "--from0",
        "--ignore-missing-args",
        "--files-from=-",
        f"{ROOT}/",
        f"{folder}/",
    ]
    subprocess.run(copy, input=names, check=True)


def lab(*words: str) -> str:
    done = subprocess.run(
        [LAB, *words], text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=180, check=False
    )
    assert done.returncode == 0, f"lab {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclass
class Cluster:
    """What a person at the controller can do, and what can be seen inside the nodes."""

    demo: str
    logs: Path
    _count: list[int] = field(default_factory=list)

    def ansible(
        self, playbook: str, *options: str, expect: int | None = 0, inventory: str = "inventory/lab"
    ) -> str:
        """Run a playbook as the README does; its output. `expect`: exit code, or None for «it must fail»."""
        self._count.append(1)
        log = self.logs / f"{len(self._count):02d}-{Path(playbook).stem}.log"
        # As a timer starts it. What Ansible runs in a terminal of the node asks nobody for a key then.
        environment = {name: value for name, value in os.environ.items() if name != "TERM"}
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    ["ansible-playbook", "-i", inventory, playbook, *options],
                    cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL, timeout=LONGEST, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                hangs = f"{playbook} hangs:\n{log.read_text()[-3000:]}\n{self.jobs()}"
                raise AssertionError(hangs) from None
        said = log.read_text()
        good = code != 0 if expect is None else code == expect
        assert good, f"{playbook} {' '.join(options)} ended with {code}:\n{said[-6000:]}"
        return said

    def jobs(self) -> str:
        """What every node's systemd is waiting for, its addresses, and what its ranks have said last."""
        script = "uptime; systemctl list-jobs; ip -brief address; "
        script += "journalctl --boot --no-pager --lines=15 --unit='aura-train@*'"
        answers = [self.lab("status")]
        for node in NODES:
            done = subprocess.run(
                [LAB, "exec", node, "sh", "-c", script],
                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False,
            )  # fmt: skip
            answers.append(f"── {node}\n{done.stdout}")
        return "\n".join(answers)

    def refused(self, playbook: str, *options: str, inventory: str = "inventory/lab") -> str:
        """The output of a playbook that must fail and must have changed nothing."""
        output = self.ansible(playbook, *options, expect=None, inventory=inventory)
        recap = output[output.index("PLAY RECAP") :] if "PLAY RECAP" in output else ""
        changed = [line for line in recap.splitlines() if "changed=" in line and "changed=0" not in line]
        assert not changed, f"refused, but something was changed:\n{output}"
        return output

    def lab(self, *words: str) -> str:
        return lab(*words)

    def sh(self, node: str, script: str) -> str:
        """Run a script as root inside a node."""
        return self.lab("exec", node, "sh", "-c", script)

    def ranks(self, nodes: list[str] | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for node in nodes or NODES:
            found += json.loads(self.lab("exec", node, "/opt/aura/rank-status"))
        return found

    def status(self, nodes: list[str] | None = None) -> list[dict[str, Any]]:
        return [rank["status"] for rank in self.ranks(nodes)]

    def done(self, run: str, nodes: list[str] | None = None) -> list[dict[str, Any]]:
        return [json.loads(self.sh(node, f"cat {RUNS}/{run}/done.json")) for node in nodes or NODES]

    def wait(self, what: str, reached: Callable[[], bool], seconds: float) -> float:
        """Wait until something is so, at most `seconds`; how long it took."""
        began = time.monotonic()
        while not reached():
            waited = time.monotonic() - began
            assert waited < seconds, f"{what}: not within {seconds} s; {json.dumps(self.status(), indent=1)}"
            time.sleep(0.5)
        return time.monotonic() - began

    def cut_off(self, nodes: list[str], others: list[str], deaf: bool = False) -> None:
        """`nodes` hear nothing of the others any more, and the others nothing of them, unless they are `deaf` only."""
        read = "sed -n 's/^AURA_ADDRESS=//p' /etc/aura/rank-0.env"
        theirs = f"{{ {', '.join(self.sh(node, read).strip() for node in others)} }}"
        rules = [
            "add table inet cut",
            "add chain inet cut in '{ type filter hook input priority -300; }'",
            f"add rule inet cut in ip saddr '{theirs}' drop",
        ]
        if not deaf:
            rules += [
                "add chain inet cut out '{ type filter hook output priority -300; }'",
                f"add rule inet cut out ip daddr '{theirs}' drop",
            ]
        for node in nodes:
            self.sh(node, " && ".join(f"nft {rule}" for rule in rules))

    def mend(self, nodes: list[str]) -> None:
        for node in nodes:
            self.sh(node, "nft delete table inet cut")

    def training(
        self, nodes: list[str] | None = None, other_than: str = "", away: list[int] | None = None
    ) -> bool:
        """Every rank has done a step in one attempt, the same on all, and not the attempt `other_than`; without the
        ranks that are `away`, where that is said.

        A rank that is just saving trains too: with a checkpoint every 20 steps there is often one.
        """
        said = self.status(nodes)
        attempts = {status.get("attempt") for status in said}
        return (
            len(attempts) == 1
            and attempts != {other_than}
            and all(status.get("state") in ("training", "saving") for status in said)
            and all(status.get("loss") is not None for status in said)
            and (away is None or all(status.get("away") == away for status in said))
        )
