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
    "mixed_precision": ["no", "fp16", "bf16", "fp8"],
    "dynamo_backend": [
        "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
        "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm",
    ],
    "dynamo_mode": ["default", "reduce-overhead", "max-autotune"],
    "zero_stage": ["0", "1", "2", "3"],
    "offload_optimizer": ["none", "cpu"],
    "gradient_clipping": float,
    "gradient_accumulation_steps": int,
}  # fmt: skip
ONLY_WITH_ZERO = ["offload_optimizer", "gradient_clipping", "gradient_accumulation_steps"]
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
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")


class Refused(Exception):
    """The sentence for the person who asked."""


def true(value: object) -> bool:
    return str(value).lower() in ("true", "yes", "1", "on")


def checked_names(given: Mapping[str, Any]) -> None:
    known = [*OWN, *CLUSTER, *ACCELERATE]
    for name in given:
        if name == "_raw_params":
            rest = f"{given[name]!r} belongs to no setting"
            raise Refused(f"{rest}: a value with blanks is quoted once more, -e \"leave_out='my data'\".")
        if name in known or PASSED_ON.match(name):
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(known)}."
        raise Refused(
            f"Unknown setting {name!r} of a script.{hint} The script's own flags: -e arguments='--{name} …'."
        )


def checked_value(name: str, value: str) -> str:
    allowed = ACCELERATE[name]
    if isinstance(allowed, list):
        if value.lower() not in allowed:
            raise Refused(f"{name} is {value!r}, but has to be one of {', '.join(allowed)}.")
        return value.lower()
    try:
        if allowed(value) >= (1 if allowed is int else 0):
            return value
    except ValueError:
        pass
    raise Refused(f"{name} is {value!r}, but has to be a positive number.")


def files_of(given: Mapping[str, Any], here: str) -> dict[str, str]:
    """The script, the directory that goes to the nodes, the list of packages; paths are relative to `here`."""

    def path(name: str) -> Path:
        return Path(here, Path(str(given[name])).expanduser()).resolve()

    script = path("script")
    if not script.is_file():
        what = "is a directory" if script.is_dir() else "is not there"
        raise Refused(f"The script {script} {what}. Name a Python file: -e script=/path/train.py")
    if script.suffix != ".py":
        raise Refused(f"The script {script} is no Python file (.py): launchers start Python on every node.")
    directory = path("directory") if "directory" in given else script.parent
    if not script.is_relative_to(directory):
        raise Refused(
            f"The script {script} does not lie in the directory {directory}, which goes to the nodes."
        )
    for place in (Path.home(), Path(__file__).resolve().parents[2]):
        if place.resolve().is_relative_to(directory):
            raise Refused(
                f"The directory {directory}, which goes to the nodes, holds {place}, and with it your keys: put the "
                "script into a directory of its own."
            )
    requirements = path("requirements") if "requirements" in given else directory / "requirements.txt"
    if "requirements" in given and not requirements.is_file():
        raise Refused(f"The list of packages {requirements} is not there.")
    return {
        "script": str(script),
        "directory": str(directory),
        "program": str(script.relative_to(directory)),
        "requirements": str(requirements) if requirements.is_file() else "",
    }


def requirement_texts(path: Path, seen: set[Path]) -> list[str]:
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
    named = re.findall(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)", text, re.MULTILINE)
    return [text, *(other for name in named for other in requirement_texts(path.parent / name, seen))]


def split(name: str, text: str) -> list[str]:
    """Words, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(f"{name} cannot be taken apart ({error}): {text}") from None


def variables(given: str | Mapping[str, Any]) -> dict[str, str]:
    """The script's own environment variables: a dictionary, or NAME=value, quoted as in a shell."""
    if isinstance(given, str):
        words = split("env", given)
        if wrong := [word for word in words if "=" not in word]:
            raise Refused(f"In env {wrong[0]!r} is no NAME=value.")
        given = dict(word.split("=", 1) for word in words)
    for name in given:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise Refused(f"No environment variable can be called {name!r}.")
        if TAKEN.fullmatch(name):
            raise Refused(f"The launch itself says what {name} is on each node: leave it out of env.")
    return {name: str(value) for name, value in given.items()}


def patterns_of(given: str | Sequence[Any]) -> list[str]:
    """As fnmatch takes them; people write ./data and, in a .gitignore, data/."""
    words = given.split(",") if isinstance(given, str) else map(str, given)
    patterns = [word.strip().removeprefix("./").rstrip("/") for word in words]
    if "*" in patterns:
        raise Refused("leave_out=* would leave out all of the directory: name what the nodes do not need.")
    return [pattern for pattern in patterns if pattern]


def read_request(given: Mapping[str, Any], here: str) -> Request:
    checked_names(given)
    if not given.get("script"):
        raise Refused("Which script? Name a Python file: -e script=/path/train.py")
    request: Request = {"problem": "", **files_of(given, here)}
    launcher = str(given.get("launcher", "torchrun"))
    if launcher not in LAUNCHERS:
        raise Refused(f"There is no launcher {launcher!r}: take one of {', '.join(LAUNCHERS)}.")
    run = str(given.get("run", Path(request["script"]).stem))
    if not NAME.fullmatch(run):
        raise Refused(
            f"A run cannot be called {run!r}: letters, digits, '.', '_' and '-', and at most 61 of them."
        )
    settings = {name: checked_value(name, str(given[name])) for name in ACCELERATE if name in given}
    if settings and launcher != "accelerate":
        raise Refused(
            f"{', '.join(settings)}: only launcher=accelerate takes this, for its default_config.yaml. "
            f"With {launcher} the script's own flags say it (-e arguments=…)."
        )
    orphans = [name for name in ONLY_WITH_ZERO if name in settings]
    if orphans and "zero_stage" not in settings:
        raise Refused(f"{', '.join(orphans)} belongs to DeepSpeed: say -e zero_stage=1 (or 2, 3), too.")
    most = str(given.get("most_megabytes", 500))
    if not most.isdecimal() or int(most) == 0:
        raise Refused(
            f"most_megabytes is {most!r}, but has to be a number: how large the directory may be, in MB."
        )
    texts = requirement_texts(Path(request["requirements"]), set()) if request["requirements"] else []
    if local := [line.strip() for text in texts for line in LOCAL.findall(text)]:
        raise Refused(
            f"The list of packages names {', '.join(local)}, which lies on this machine: nodes would keep what it was "
            "at the first launch. Leave it out of the list: the script's directory goes to the nodes with all that is "
            "in it, and -e env='PYTHONPATH=src' says where packages lie in there."
        )
    packages = LAUNCHERS[launcher] + (["deepspeed"] if "zero_stage" in settings else [])
    return request | {
        "launcher": launcher,
        "run": run,
        "arguments": split("arguments", str(given.get("arguments", ""))),
        "environment": variables(given.get("env", {})),
        "settings": settings,
        "packages": packages,
        "requirements_sum": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "indexes": [line for text in texts for line in INDEX.findall(text)],
        "most_megabytes": int(most),
        "leave_out": patterns_of(given.get("leave_out", [])),
        "own_environment": bool(packages or request["requirements"]),
        # Both compile while they run: torch.compile its kernels, DeepSpeed its operators.
        "compiles": "deepspeed" in packages or settings.get("dynamo_backend") == "inductor",
        "wait": true(given.get("wait", False)),
        "cpu": true(given.get("cpu", False)),
    }


def script_request(given: Mapping[str, Any], here: str) -> Request:
    """What was asked for, complete; or a dictionary with the sentence that refuses it, in `problem`."""
    try:
        return read_request(given, here)
    except Refused as refused:
        return {"problem": str(refused)}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"script_request": script_request}
