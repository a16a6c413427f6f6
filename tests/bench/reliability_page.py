"""results/reliability.md out of the figures of reliability.py."""

import math
from collections import Counter
from itertools import pairwise

TURNS = 30  # of a trajectory in the load
WAYS = {
    "python": "as before: collected by Python's thresholds, nothing given back",
    "seldom": "collected seldom, nothing given back",
    "ours": "collected seldom, free memory given back after the last episode",
}


def page(found):
    """The figures as text."""
    out = [
        "# Reliability",
        "",
        "Written by `python tests/bench/reliability.py`; figures: bench/reliability.json.",
        "",
    ]
    if one := found.get("outputs"):
        readers = one["readers"]
        tries, bad = sum(r["texts"] for r in readers.values()), sum(r["exceptions"] for r in readers.values())
        each = next(iter(readers.values()))["texts"]
        out += [
            "## Model outputs",
            "",
            f"{each:,} fuzzed texts through each of {len(readers)} readers ({', '.join(readers)}): {tries:,} "
            f"tries, {bad} exceptions.",
            "",
        ]
    if one := found.get("growth"):
        name, worst = max(one["parsers"].items(), key=lambda pair: pair[1]["times"])
        out += [
            f"CPU time of four times the length ({one['length']:,} to {4 * one['length']:,} characters of "
            f"one opening after another): at most {worst['times']:.1f} times ({name}, "
            f"{worst['text']!r}); 4 is "
            "linear, 16 quadratic; below 0.2 ms it is not told.",
            "",
        ]
    if one := found.get("loop"):
        out += ["## Load", "", *_loop(one, *map(found.get, ("memory", "ways", "loop_before")))]
    if one := found.get("advantages"):
        out += [
            f"GiGPO's advantages, lists to numbers: CPU seconds for {one['rows']} turns: "
            f"{[round(s, 4) for s in one['cpu_seconds']]}, exponent "
            f"{_exponents(one['rows'], one['cpu_seconds'])} from one size to the next.",
            "",
        ]
    if one := found.get("controller"):
        out += _controller(one)
    if one := found.get("folder"):
        out += [
            "Run folders read whole, in one process; memory in MB and CPU seconds, by step (Run."
            "trajectories) and by trajectory (Run.each). Their text repeats: on the disk the largest has "
            f"{max(point['packed_gb'] for point in one) * 1e3:.1f} MB.",
            "",
            "| GB unpacked | steps | MB a step | before | by step | by trajectory | s | s |",
            "| --- |" + " --- |" * 7,
        ]
        for point in one:
            most, cpu = point["most_mb"], point["cpu_seconds"]
            out.append(
                f"| {point['unpacked_gb']:.2f} | {point['steps']} | {point['step_mb']:.0f} | "
                f"{point['base_mb']:.0f} | {most['trajectories']:.0f} | {most['each']:.0f} | "
                f"{cpu['trajectories']:.1f} | {cpu['each']:.1f} |"
            )
        out.append("")
    if one := found.get("kills"):
        out += [*_kills(one)]
    return "\n".join(out).rstrip() + "\n"


def _exponents(sizes, seconds):
    """p of seconds ~ size^p between neighbouring sizes."""
    points = pairwise(zip(sizes, seconds, strict=True))
    return ", ".join(f"{math.log(t / s) / math.log(m / n):.2f}" for (n, s), (m, t) in points)


def _controller(one):
    """What the trainer itself computes in a step, by part."""
    parts = list(one["cpu_seconds"][0])
    out = [
        "The trainer's own work in a step (turn rows, GiGPO): verl's batch read as rows, turns, advantages, "
        "spread over tokens, records, compressed file; CPU seconds by number of rows, and the exponent from "
        "one size to the next.",
        "",
        f"| part | {' | '.join(f'{rows:,}' for rows in one['rows'])} | exponents |",
        "| --- |" + " --- |" * (len(one["rows"]) + 1),
    ]
    for part in parts:
        seconds = [point[part] for point in one["cpu_seconds"]]
        shown = " | ".join(f"{s:.3f}" for s in seconds)
        out.append(f"| {part} | {shown} | {_exponents(one['rows'], seconds)} |")
    return [*out, ""]


def _loop(one, memory, ways, before):
    """Load: now and by Python's own thresholds, and what was measured before they were changed."""

    def row(name, sizes, cpu, exponent):
        return f"| {name} | {' | '.join(f'{s:.1f}' for s in cpu)} | {exponent:.2f} |"

    def megabytes(values):
        return ", ".join(f"{mb:.0f}" for mb in values)

    out = [
        f"Agent loop, {TURNS} turns a trajectory, a server that answers at once; CPU seconds by the number "
        "of trajectories in flight, and their exponent. Both ways take turns in one run.",
        "",
        f"| garbage collected | {' | '.join(f'{size:,}' for size in one['sizes'])} | exponent |",
        "| --- |" + " --- |" * (len(one["sizes"]) + 1),
    ]
    names = {"ours": "seldom (rollout/garbage.py)", "python": "by Python's thresholds, in the same run"}
    for name, label in names.items():
        out.append(row(label, one["sizes"], one["cpu_seconds"][name], one["exponent"][name]))
    if before:
        label = "by Python's thresholds, the earlier run"
        out.append(row(label, before["sizes"], before["cpu_seconds"], before["exponent"]))
    out += [
        "",
        "What grew with the square were full collections: their number grows with the turns played, and each "
        "walks through every token of every prompt that is alive. Without them the time of a trajectory is "
        "the same at every size.",
        "",
    ]
    if memory:
        out += [
            f"Memory after each of ten steps of {memory['trajectories']:,} trajectories, MB: "
            f"{megabytes(memory['rss_mb'])}; at most {memory['highest_mb']:.0f} during a step. Before (after "
            f"the four sizes above): {megabytes(before['rss_mb']) if before else 'not measured'}; its "
            "highest was not measured, and its rise at the fifth step was not seen again.",
            "",
        ]
    for way, label in WAYS.items() if ways else ():
        one = ways[way]
        out += [
            f"* {label}: {megabytes(one['rss_mb'])} MB after each of {len(one['rss_mb'])} steps of "
            f"{one['trajectories']:,}, at most {one['highest_mb']:.0f} during them",
        ]
    if ways:
        out += [
            "",
            "What stays after a step are free blocks that malloc does not return by itself, and they slowly "
            "grow; to collect seldom alone leaves more of them.",
            "",
        ]
    return out


def _kills(one):
    tries = one["tries"]
    out = [
        "## Processes killed (SIGKILL) at a random moment",
        "",
        "| target | tries | went on | stopped | hung | slowest, s | without a sentence | left behind |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for target in dict.fromkeys(line["target"] for line in tries):
        mine = [line for line in tries if line["target"] == target]
        ends = Counter(line["outcome"] for line in mine)
        mute = sum(line["outcome"] == "stops" and not line["sentence"] for line in mine)
        left = sum(bool(line["left"]) for line in mine)
        slowest = max(line["seconds"] for line in mine)
        out.append(
            f"| {target} | {len(mine)} | {ends['continues']} | {ends['stops']} | {ends['hangs']} | "
            f"{slowest:g} | {mute} | {left} |"
        )
    out += [
        "",
        f"{len(tries)} tries in all. A killed driver cannot say anything: the next start and "
        "`verl-multiturn doctor RUN` do.",
        "",
    ]
    phases = Counter(line["phase"] for line in tries)
    hit = ", ".join(f"{name} {count}" for name, count in phases.most_common())
    out += [f"Phases that were hit, as the heartbeat had them: {hit}.", ""]
    if judged := [line for line in tries if "resumed_right" in line]:
        wrong = [line for line in judged if not line["resumed_right"]]
        said = "; ".join(f"checkpoint {x['checkpoint']}, first step {x['first_step']}" for x in wrong)
        out += [
            f"First step of a start equal to the checkpoint it found + 1: {len(judged) - len(wrong)} of "
            f"{len(judged)} starts{f' (else: {said})' if wrong else ''}.",
            "",
        ]
    out += [f"* {line['target']}: {line['note']}" for line in tries if "note" in line]
    if audit := one["audit"]:
        out += ["After the last of them:", "", *_audit(audit), ""]
    return out


def _audit(audit):
    """What is whole of the run that was hit, and what it shares with one that was not."""
    plain = ("steps", "gaps", "metric_gaps", "metric_doubles", "validation_gaps", "validation_doubles",
             "trajectories", "doubled", "half", "sizes")  # fmt: skip
    out = [f"* {name}: {audit[name]}" for name in plain]
    if weights := audit.get("weights"):
        step, names = audit["first_unequal"] or ("none", [])
        out += [
            f"* weights at step {weights['step']} against a run of the same seeds that nothing hit: "
            f"{weights['unequal']} of {weights['tensors']} tensors unequal (by {weights['largest']:g})",
            f"* metrics of steps, seconds and memory apart: {audit['metrics_unequal']} of "
            f"{audit['metrics_compared']} unequal, the first at step {step} ({', '.join(names)})",
        ]
    return out
