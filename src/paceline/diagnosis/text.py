"""A diagnosis as a page of text."""

import json
from collections.abc import Iterator, Mapping

from paceline.diagnosis.results import Diagnosis, Drift, Switch
from paceline.diagnosis.wording import (
    Language,
    cause_name,
    note,
    percent,
    prerequisite,
    risk,
    seconds,
    sentence,
    singular,
    stage_name,
)

_MAX_SWITCHES = 12

_HEADS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "head": "{name}: {step} per step, mean of {count} steps ({warmup} warm-up and {profiled} profiled left out)",
        "bottleneck": "Bottleneck: {stage}, {kind}-bound ({seconds}, {share} of the step)",
        "usual": "Longest stage: {stage} ({seconds}, {share} of the step); as a rule {kind}-bound, not measured",
        "stages": "Stages, seconds per step",
        "source": "[{source}]",
        "causes": "measured in a profiled step",
        "spans": "stated by its spans",
        "nature": "not measured; usual for such a stage",
        "waits": "Waiting, seconds per step",
        "findings": "What stands out",
        "switches": "What would help",
        "changing": "What would help, but changes what is learned",
        "risk": "risk: {risk}  needs: {needs}",
        "ranks": "Ranks: busy, waiting, tokens of the update",
        "rank": "rank {rank}: {busy}, {idle}, {tokens}",
        "drift": "Drift: {change} over the run (95 %: {low} to {high})",
        "no_drift": "Drift: none to be seen ({change} over the run, 95 %: {low} to {high})",
        "notes": "Notes",
    },
    "zh": {
        "head": "{name}：每步 {step}，{count} 步的平均（不含 {warmup} 个预热步和 {profiled} 个剖析步）",
        "bottleneck": "瓶颈：{stage}，受限于{kind}（{seconds}，占该步 {share}）",
        "usual": "最长的阶段：{stage}（{seconds}，占该步 {share}），通常受限于{kind}，此处未实测",
        "stages": "各阶段每步时间",
        "source": "［{source}］",
        "causes": "由剖析步实测",
        "spans": "由计时区间标注",
        "nature": "未实测；该阶段通常如此",
        "waits": "每步等待时间",
        "findings": "突出的问题",
        "switches": "可采取的措施",
        "changing": "有帮助，但会改变训练结果的措施",
        "risk": "风险：{risk}  前提：{needs}",
        "ranks": "各进程：忙碌、等待、更新的词元数",
        "rank": "进程 {rank}：{busy}，{idle}，{tokens}",
        "drift": "趋势：整个运行期间 {change}（95 %：{low} 至 {high}）",
        "no_drift": "趋势：未见明显变化（整个运行期间 {change}，95 %：{low} 至 {high}）",
        "notes": "说明",
    },
}


def diagnosis_text(found: Diagnosis, lang: Language = "en") -> str:
    """The page: head, bottleneck, stages, waits, findings, switches, ranks, drift, notes."""
    return singular("\n".join(_lines(found, lang)))


def _lines(found: Diagnosis, lang: Language) -> Iterator[str]:
    heads = _HEADS[lang]
    yield heads["head"].format(
        name=found.run_name,
        step=seconds(found.step_s),
        count=found.num_steps,
        warmup=found.num_warmup_steps,
        profiled=found.num_profiled_steps,
    )
    if found.bottleneck is not None:
        first = found.bottleneck
        yield heads["bottleneck" if first.is_measured else "usual"].format(
            stage=stage_name(first.stage, lang),
            kind=cause_name(first.kind, lang),
            seconds=seconds(first.seconds),
            share=percent(first.seconds / found.step_s if found.step_s else 0.0),
        )
    yield f"\n{heads['findings']}"
    if not found.findings:
        yield f"  {note('no_alarm', lang)}"
    for number, finding in enumerate(found.findings, 1):
        yield f"  {number}. {sentence(finding, lang)} [{seconds(finding.low)} – {seconds(finding.high)}]"
    yield from _switches(found, lang)
    yield from _times(found, lang)
    yield from _ranks(found, lang)
    yield f"\n{heads['notes']}"
    yield from (f"  - {note(text, lang)}" for text in found.notes)


def _switches(found: Diagnosis, lang: Language) -> Iterator[str]:
    heads = _HEADS[lang]
    heading = ""
    for number, switch in enumerate(found.switches[:_MAX_SWITCHES], 1):
        if heading != (heading := "changing" if switch.changes_training else "switches"):
            yield f"\n{heads[heading]}"
        yield f"  {number}. {sentence(switch, lang)}"
        yield f"     {'  '.join(settings(switch))}"
        yield f"     {heads['risk'].format(risk=risk(switch, lang), needs=prerequisite(switch, lang))}"


def settings(switch: Switch) -> list[str]:
    """A switch's settings as they are written on a command line."""
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in switch.keys.items()
    ]


def _times(found: Diagnosis, lang: Language) -> Iterator[str]:
    heads = _HEADS[lang]
    yield f"\n{heads['stages']}"
    for stage in found.stages:
        source = heads["source"].format(source=heads[stage.source])
        yield (
            f"  {stage_name(stage.stage, lang)}: {seconds(stage.seconds)} ({percent(stage.share)}), "
            f"{cause_name(stage.kind, lang)} {source}"
        )
    share = found.unaccounted_s / found.step_s if found.step_s else 0.0
    yield f"  {stage_name('unaccounted', lang)}: {seconds(found.unaccounted_s)} ({percent(share)})"
    if found.waits:
        yield f"\n{heads['waits']}"
        yield from (f"  {sentence(wait, lang)}" for wait in found.waits)


def _ranks(found: Diagnosis, lang: Language) -> Iterator[str]:
    heads = _HEADS[lang]
    if len(found.ranks) > 1:
        yield f"\n{heads['ranks']}"
        for one in found.ranks:
            busy, idle = seconds(one.busy_s), seconds(one.idle_s)
            yield "  " + heads["rank"].format(
                rank=one.rank, busy=busy, idle=idle, tokens=f"{one.tokens:,.0f}"
            )
    if found.drift is not None:
        is_seen = found.drift.low > 0.0 or found.drift.high < 0.0
        yield f"\n{_drift(found.drift, heads['drift' if is_seen else 'no_drift'])}"


def _drift(drift: Drift, text: str) -> str:
    scale = drift.change_s / drift.slope_s if drift.slope_s else 0.0
    return text.format(
        change=seconds(drift.change_s), low=seconds(drift.low * scale), high=seconds(drift.high * scale)
    )
