"""All rules over a launch, and what is printed of them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.adapters.verl import (
    rules_batch,
    rules_memory,
    rules_parallel,
    rules_rollout,
    rules_run,
    rules_tokens,
)
from paceline.adapters.verl.batch_sizes import batch_sizes, describe_sizes
from paceline.adapters.verl.findings import Finding, Rule
from paceline.adapters.verl.launch import VerlLaunch

RULES: tuple[Rule, ...] = (
    *rules_batch.RULES,
    *rules_tokens.RULES,
    *rules_parallel.RULES,
    *rules_memory.RULES,
    *rules_rollout.RULES,
    *rules_run.RULES,
)
TABLE_BEGIN = "<!-- rules: begin -->"
TABLE_END = "<!-- rules: end -->"
_ORDER = {"error": 0, "warning": 1, "advice": 2}


def lint_launch(launch: VerlLaunch) -> list[Finding]:
    """Every finding, errors first, in the order of the rules within a severity."""
    found = [
        Finding(
            rule=rule.id,
            severity=rule.severity,
            key=hit.key,
            current=hit.current,
            suggested=hit.suggested,
            why=hit.why,
            effect=hit.effect,
            source=rule.source,
            row=rule.row,
            line=launch.line,
        )
        for rule in RULES
        for hit in rule.check(launch)
    ]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])


def unknown_settings(launch: VerlLaunch) -> list[str]:
    """Settings whose value depends on what only a run could tell; rules that read them find nothing."""
    return [
        key for key, override in launch.settings.items() if "${" in override.text or "$(" in override.text
    ]


def lint_record(launch: VerlLaunch, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints of one launch."""
    return {
        "entry": launch.entry,
        "line": launch.line,
        "batch": batch_sizes(launch).as_dict(),
        "findings": [finding.as_dict() for finding in findings],
        "unknown": unknown_settings(launch),
        "notes": list(launch.notes),
    }


def lint_text(launch: VerlLaunch, findings: Sequence[Finding]) -> str:
    """The same for a person."""
    lines = [f"launch on line {launch.line}: {launch.entry or 'no module named'}", "", "batch arithmetic"]
    lines += [describe_sizes(batch_sizes(launch)), ""]
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.key} = {_shown(finding.current)}  [{finding.rule}]")
        lines.append(f"    {finding.why}")
        lines.append(f"    suggested: {_shown(finding.suggested)}")
        if finding.effect:
            lines.append(f"    effect: {finding.effect}")
        lines.append(f"    source: {finding.source} ({finding.row})")
    counts = [sum(finding.severity == severity for finding in findings) for severity in _ORDER]
    lines.append(f"{counts[0]} errors, {counts[1]} warnings, {counts[2]} pieces of advice")
    if unknown := unknown_settings(launch):
        lines.append(f"not known without running the script: {', '.join(unknown)}")
    lines += [f"note: {note}" for note in launch.notes]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


def rule_table() -> str:
    """Every rule as a Markdown table: docs/adapters.md."""
    lines = ["| Rule | Severity | Asks | From | Row |", "|---|---|---|---|---|"]
    for rule in RULES:
        question = rule.check.__name__.replace("_", " ")
        lines.append(f"| `{rule.id}` | {rule.severity} | {question} | {rule.source} | {rule.row} |")
    return "\n".join(lines)


def with_rule_table(document: str) -> str:
    """`document` with the present table between its markers. Raises `ValueError` unless it holds each marker once."""
    if document.count(TABLE_BEGIN) != 1 or document.count(TABLE_END) != 1:
        raise ValueError(f"the document must hold {TABLE_BEGIN} and {TABLE_END} once each")
    before, rest = document.split(TABLE_BEGIN)
    return f"{before}{TABLE_BEGIN}\n{rule_table()}\n{TABLE_END}{rest.split(TABLE_END)[1]}"


if __name__ == "__main__":  # python -m paceline.adapters.verl.lint docs/adapters.md
    path = Path(sys.argv[1])
    path.write_text(with_rule_table(path.read_text(encoding="utf-8")), encoding="utf-8")
