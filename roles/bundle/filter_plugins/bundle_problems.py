"""What a node needs that a bundle does not have."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


def driver_problem(bundle: dict[str, Any], node: str, driver: list[str], others: list[str]) -> str:
    """Why the node's NVIDIA driver cannot come from this bundle: empty when it can. others: what else it lacks."""
    lacking = [name for name in driver if name not in bundle["packages"]]
    if not lacking:
        return ""
    named = " ".join([*driver, *others])
    problem = f"{node} needs an NVIDIA driver ({', '.join(driver)}), and {bundle['file']} does not have "
    unknown = [name for name in lacking if name in bundle["unknown"]]
    if unknown:
        return (
            f"{problem}{', '.join(unknown)}: apt did not know them where it was written. Write it again where apt's "
            "sources have Ubuntu's sections main, restricted and multiverse (make bundle "
            f"PACKAGES='{named}')."
        )
    return (
        f"{problem}{', '.join(lacking)}: write it again with all of them (make bundle PACKAGES='{named}'), "
        "since the driver's modules fit the kernel that comes with them."
    )


def bundle_problems(
    bundle: dict[str, Any],
    node: str,
    seen: dict[str, Any],
    wheelhouse: str,
    build: str,
    driver: list[str],
) -> list[str]:
    """Sentences about why this node cannot be set up from this bundle; none when it can.

    bundle: what files/bundle says of it. seen: the answer of node_state. wheelhouse: the name of the one that
    the node needs, with this `build` of torch. driver: the packages that the role nvidia_driver will install there.
    """
    file, system = bundle["file"], bundle["system"]
    has = f"{seen['distribution']} {seen['distribution_major_version']} ({seen['machine']})"
    made_for = f"{system['distribution']} {system['version']} ({system['machine']})"
    if has != made_for:
        return [
            f"{node} runs {has}, and {file} is for {made_for}: write another one (make bundle) for {has}."
        ]
    problems = []
    lacking = sorted(set(seen["missing"]) - {*bundle["packages"], *bundle["unknown"]})
    if lacking:
        problems.append(
            f"{node} needs the packages {', '.join(lacking)}, which {file} does not have: "
            f"write it again from these playbooks (make bundle PACKAGES='{' '.join([*driver, *lacking])}', and what "
            "you have named there before)."
        )
    problems += filter(None, [driver_problem(bundle, node, driver, lacking)])
    there = bundle["wheelhouses"].get(wheelhouse)
    if there is None:
        problems.append(
            f"{node} needs the wheels for torch's build {build} as these playbooks lock them ({wheelhouse}), "
            f"and {file} was written for {bundle['torch']} ({', '.join(bundle['wheelhouses'])}): write it again "
            f"(make bundle BUILD={build})."
        )
        return problems
    # The archive while it is copied, what is in it, and apt's own lists; the wheels, and what they become.
    needed = 3 * bundle["packages_bytes"] if seen["missing"] or driver else 0
    if seen["files"].get("/opt/aura/wheelhouse.complete", {}).get("kind", "absent") == "absent":
        needed += there["bytes"] + there["installed"]
    room = seen["mounts"]["/opt"]["free"]
    if room < needed:
        problems.append(
            f"{node} has {room / GIB:.1f} GiB left below /opt, and needs {needed / GIB:.1f} GiB: make room there."
        )
    return problems


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"bundle_problems": bundle_problems}
