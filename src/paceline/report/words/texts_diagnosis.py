"""The diagnosis' frame; its sentences are `paceline.diagnosis.wording`'s."""

TEXTS: dict[str, tuple[str, str]] = {
    "diagnosis.usual-bottleneck": (
        "The longest stage is {stage}: {time} of a step, {share}; as a rule bound by {cause}, which was not measured.",
        "最长的阶段是{stage}：每步 {time}，占 {share}。这类阶段通常受限于{cause}，此处未实测。",
    ),
    "diagnosis.bottleneck": (
        "The bottleneck is {stage}, bound by {cause}: {time} of a step, {share}.",
        "瓶颈是{stage}，受限于{cause}：每步 {time}，占 {share}。",
    ),
    "diagnosis.stages": ("What bounds each stage", "各阶段受限于什么"),
    "diagnosis.stages-caption": (
        "Seconds per step, mean over ranks and {steps}; {warmup} warm-up and {profiled} profiled steps are left out.",
        "每步秒数，对所有进程和 {steps}取平均；不含 {warmup} 个预热步和 {profiled} 个剖析步。",
    ),
    "diagnosis.stage": ("Stage", "阶段"),
    "diagnosis.time": ("Time", "时间"),
    "diagnosis.share": ("Share", "占比"),
    "diagnosis.kind": ("Bound by", "受限于"),
    "diagnosis.evidence": ("Evidence", "证据"),
    "diagnosis.source-causes": ("measured", "实测"),
    "diagnosis.source-spans": ("stated by spans", "计时区间标注"),
    "diagnosis.source-nature": ("usual, not measured", "通常如此，未实测"),
    "diagnosis.waits": ("What steps wait for", "每步在等待什么"),
    "diagnosis.waits-caption": (
        "Seconds per step and rank in which nothing is done because of something else; bars are 95 % intervals.",
        "每步每进程因其他事情而停顿的秒数；横线为 95 % 区间。",
    ),
    "diagnosis.per-step": ("seconds per step", "每步秒数"),
    "diagnosis.findings": ("What stands out", "突出的问题"),
    "diagnosis.findings-caption": (
        "Costs above the limit that a setting would remove or reduce, the largest first; bars are 95 % intervals.",
        "超过阈值、可由设置消除或降低的开销，从大到小排列；横条为 95 % 区间。",
    ),
    "diagnosis.cell": ("{stage} · {cause}", "{stage} · {cause}"),
    "diagnosis.amount": ("{value} a step ({low} – {high})", "每步 {value}（{low} – {high}）"),
    "diagnosis.switches": ("What would help", "可采取的措施"),
    "diagnosis.switches-caption": (
        "Predicted seconds saved per step, the largest first, with 95 % intervals. Predictions are of one switch at a "
        "time; an ablation measures them.",
        "预计每步节省的秒数，从大到小排列，附 95 % 区间。预测针对单个开关；消融实验可加以实测。",
    ),
    "diagnosis.changing": ("What would help, but changes what is learned", "有帮助，但会改变训练结果的措施"),
    "diagnosis.changing-caption": (
        "These change the objective, the reward, the samples or the optimisation: before you keep one, compare reward "
        "curves and not step times alone.",
        "这些措施会改变目标、奖励、样本或优化方式：采用前请比较奖励曲线，而不仅是每步耗时。",
    ),
    "diagnosis.more": ("The first {shown} of {all}.", "仅列出 {all} 项中的前 {shown} 项。"),
    "diagnosis.risk": ("Risk", "风险"),
    "diagnosis.prerequisite": ("Needs", "前提"),
    "diagnosis.reduces": ("Reduces", "减少"),
}
