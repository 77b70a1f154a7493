"""What was asked of launch.yml for somebody else's script: complete, or refused with a sentence."""

from __future__ import annotations

import difflib
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Request = dict[str, Any]

# The package that each launcher comes with, beside torch.
LAUNCHERS = {"torchrun": [], "accelerate": ["accelerate"], "deepspeed": ["deepspeed"]}
# What -e may say. Those of default_config.yaml belong to accelerate.
OWN = "script directory requirements launcher arguments env run wait cpu leave_out most_megabytes".split()
CLUSTER = ["training_cards", "rendezvous_port"]
ACCELERATE = {
    "mixed_precision": "no|fp16|bf16|fp8",
    "dynamo_backend": "no|eager|aot_eager|inductor|cudagraphs|onnxrt|tensorrt|ipex|tvm",
    "dynamo_mode": "default|reduce-overhead|max-autotune",
    "zero_stage": "0|1|2|3",
    "offload_optimizer": "none|cpu",
    "gradient_clipping": r"\d+(\.\d+)?(e-?\d+)?",
    "gradient_accumulation_steps": r"[1-9]\d*",
}
ONLY_WITH_ZERO = {"offload_optimizer", "gradient_clipping", "gradient_accumulation_steps"}
PASSED_ON = re.compile(r"ansible_|script_|inventory_check_")  # settings of a role, and Ansible's own
# What the launch itself says to launchers and ranks.
TAKEN = re.compile(
    r"PATH|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES|AURA_SCRIPT_.*|TORCHELASTIC_.*"
    r"|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|ACCELERATE_USE_CPU|DS_ACCELERATOR"
)
# Lines of a list of packages: where else they are to be had, and what lies on this machine.
INDEX = re.compile(
    r"^\s*((?:-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)[ \t=]+\S+)", re.MULTILINE
)
LOCAL = re.compile(
    r"^\s*((?:-e|--editable)[ \t=]+(?!(?:git|hg|svn|bzr)\+).*|\.{0,2}/.*|\.\.?(?:\[.*)?|file:.*"
    r"|[\w.\[\],-]+\s*@\s*file:.*)$",
    re.MULTILINE,
)
INCLUDED = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)", re.MULTILINE)


class Refused(Exception):
    """The sentence for the person who asked."""


def refuse_if(wrong: object, sentence: str) -> None:
    if wrong:
        raise Refused(sentence)


def find_files(given: Mapping[str, Any], here: Path) -> dict[str, str]:
    """The script, the directory that goes to the nodes, the list of packages; paths are relative to `here`."""

    def path(name: str) -> Path:
        return (here / Path(str(given[name])).expanduser()).resolve()

    refuse_if(not given.get("script"), "Which script? Name a Python file: -e script=/path/train.py")
    script = path("script")
    what = "is a directory" if script.is_dir() else "is not there"
    refuse_if(
        not script.is_file(), f"The script {script} {what}. Name a Python file: -e script=/path/train.py"
    )
    refuse_if(
        script.suffix != ".py",
        f"The script {script} is no Python file (.py): launchers start Python on every node.",
    )
    directory = path("directory") if "directory" in given else script.parent
    refuse_if(
        not script.is_relative_to(directory),
        f"The script {script} does not lie in the directory {directory}, which goes to the nodes.",
    )
    for place in (Path.home(), Path(__file__).resolve().parents[2]):
        refuse_if(
            place.resolve().is_relative_to(directory),
            f"The directory {directory}, which goes to the nodes, holds {place}, and with it your keys: put the script "
            "into a directory of its own.",
        )
    requirements = path("requirements") if "requirements" in given else directory / "requirements.txt"
    refuse_if(
        "requirements" in given and not requirements.is_file(),
        f"The list of packages {requirements} is not there.",
    )
    return {
        "script": str(script),
        "directory": str(directory),
        "program": str(script.relative_to(directory)),
        "requirements": str(requirements) if requirements.is_file() else "",
    }


def read_requirements(path: Path, seen: set[Path]) -> list[str]:
    """The text of a list of packages, and of those that it names with -r and -c."""
    if path in seen or not path.is_file():
        return []
    seen.add(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Refused(
            f"The list of packages {path} is no text in UTF-8 (what PowerShell's > writes is none). Write it again: "
            f"pip freeze | Out-File -Encoding ascii {path.name}"
        ) from None
    except OSError as error:
        raise Refused(f"The list of packages {path} cannot be read: {error.strerror}.") from None
    local = [line.strip() for line in LOCAL.findall(text)]
    refuse_if(
        local,
        f"The list of packages names {', '.join(local)}, which lies on this machine: nodes would keep what it was at "
        "the first launch. Leave it out of the list: the script's directory goes to the nodes with all that is in it, "
        "and -e env='PYTHONPATH=src' says where packages lie in there.",
    )
    return [
        text,
        *(one for name in INCLUDED.findall(text) for one in read_requirements(path.parent / name, seen)),
    ]


def split(name: str, text: str) -> list[str]:
    """Words, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(f"{name} cannot be taken apart ({error}): {text}") from None


def read_variables(given: str | Mapping[str, Any]) -> dict[str, str]:
    """The script's own environment variables: a dictionary, or NAME=value, quoted as in a shell."""
    if isinstance(given, str):
        words = split("env", given)
        for word in words:
            refuse_if("=" not in word, f"In env {word!r} is no NAME=value.")
        given = dict(word.split("=", 1) for word in words)
    for name in given:
        refuse_if(not re.fullmatch(r"[A-Za-z_]\w*", name), f"No environment variable can be called {name!r}.")
        refuse_if(
            TAKEN.fullmatch(name), f"The launch itself says what {name} is on each node: leave it out of env."
        )
    return {name: str(value) for name, value in given.items()}


def read_patterns(given: str | Sequence[Any]) -> list[str]:
    """As fnmatch takes them; people write ./data and, in a .gitignore, data/."""
    words = given.split(",") if isinstance(given, str) else map(str, given)
    patterns = [word.strip().removeprefix("./").rstrip("/") for word in words]
    refuse_if(
        "*" in patterns, "leave_out=* would leave out all of the directory: name what the nodes do not need."
    )
    return [pattern for pattern in patterns if pattern]


def check_names(given: Mapping[str, Any]) -> None:
    known = [*OWN, *CLUSTER, *ACCELERATE]
    for name in given:
        refuse_if(
            name == "_raw_params",
            f"{given[name]!r} belongs to no setting: a value with blanks is quoted once more, "
            "-e \"leave_out='my data'\".",
        )
        near = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
        refuse_if(
            name not in known and not PASSED_ON.match(name),
            f"Unknown setting {name!r} of a script. {hint} The script's own flags: -e arguments='--{name} …'.",
        )


def read_request(given: Mapping[str, Any], here: Path) -> Request:
    check_names(given)
    request: Request = {"problem": "", **find_files(given, here)}
    launcher = str(given.get("launcher", "torchrun"))
    refuse_if(
        launcher not in LAUNCHERS,
        f"There is no launcher {launcher!r}: take one of {', '.join(LAUNCHERS)}.",
    )
    run, most = str(given.get("run", Path(request["script"]).stem)), str(given.get("most_megabytes", 500))
    refuse_if(
        not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,60}", run),
        f"A run cannot be called {run!r}: letters, digits, '.', '_' and '-', and at most 61 of them.",
    )
    settings = {name: str(given[name]).lower() for name in ACCELERATE if name in given}
    refuse_if(
        settings and launcher != "accelerate",
        f"{', '.join(settings)}: only launcher=accelerate takes this, for its default_config.yaml. With {launcher} the "
        "script's own flags say it (-e arguments=…).",
    )
    for name, value in settings.items():
        words = (
            "a positive number"
            if "\\d" in ACCELERATE[name]
            else f"one of {ACCELERATE[name].replace('|', ', ')}"
        )
        refuse_if(not re.fullmatch(ACCELERATE[name], value), f"{name} is {value!r}, but has to be {words}.")
    orphans = sorted(ONLY_WITH_ZERO & settings.keys())
    refuse_if(
        orphans and "zero_stage" not in settings,
        f"{', '.join(orphans)} belongs to DeepSpeed: say -e zero_stage=1 (or 2, 3), too.",
    )
    refuse_if(
        not re.fullmatch(r"[1-9]\d*", most),
        f"most_megabytes is {most!r}, but has to be a number: how large the directory may be, in MB.",
    )
    texts = read_requirements(Path(request["requirements"]), set()) if request["requirements"] else []
    packages = LAUNCHERS[launcher] + (["deepspeed"] if "zero_stage" in settings else [])
    return request | {
        "launcher": launcher,
        "run": run,
        "arguments": split("arguments", str(given.get("arguments", ""))),
        "environment": read_variables(given.get("env", {})),
        "settings": settings,
        "packages": packages,
        "requirements_sum": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "indexes": [line for text in texts for line in INDEX.findall(text)],
        "most_megabytes": int(most),
        "leave_out": read_patterns(given.get("leave_out", [])),
        "own_environment": bool(packages or request["requirements"]),
        # Both compile while they run: torch.compile its kernels, DeepSpeed its operators.
        "compiles": "deepspeed" in packages or settings.get("dynamo_backend") == "inductor",
        **{name: str(given.get(name)).lower() in ("true", "yes", "1", "on") for name in ("wait", "cpu")},
    }


def script_request(given: Mapping[str, Any], here: str) -> Request:
    """What was asked for, complete; or a dictionary with the sentence that refuses it, in `problem`."""
    try:
        return read_request(given, Path(here))
    except Refused as refused:
        return {"problem": str(refused)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"script_request": script_request}
