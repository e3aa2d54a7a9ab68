"""The run in plain sentences."""

TEXTS: dict[str, tuple[str, str]] = {
    "summary.failed": ("The run failed after {done}{reason}.", "运行在 {done}之后失败{reason}。"),
    "summary.reason": (": {message}", "：{message}"),
    "summary.refused": ("The run was refused before it started: {message}", "运行在开始前被拒绝：{message}"),
    "summary.died": (
        "The run stopped without ending after {done}: its process is gone and has not said why; it can be resumed from "
        "its last checkpoint.",
        "运行在 {done} 后未正常结束即停止：其进程已不存在，也没有留下原因；可以从最近的检查点恢复。",
    ),
    "summary.stopped": (
        "The run was asked to stop and ended after {done}.",
        "运行收到停止请求，在 {done}之后结束。",
    ),
    "summary.imported": (
        "Read from another framework's records, which hold {done}; how the run ended is not known.",
        "读自其他框架的记录，共 {done}；运行如何结束未知。",
    ),
    "summary.going": (
        "The run is still going or was interrupted; this is the state after {done}.",
        "运行仍在进行或被中断；这是 {done}之后的状态。",
    ),
    "summary.loss-unknown": (
        "Held-out loss was not measured both before and after training.",
        "训练前后没有都测量留出集损失。",
    ),
    "summary.loss-fell": (
        "Held-out loss fell from {before} to {after} nats per learned token (perplexity {pbefore} to {pafter}){where}.",
        "留出集损失从每学习词元 {before} nat 降到 {after} nat（困惑度 {pbefore} → {pafter}）{where}。",
    ),
    "summary.loss-rose": (
        "Held-out loss rose from {before} to {after} nats per learned token (perplexity {pbefore} to {pafter}){where}.",
        "留出集损失从每学习词元 {before} nat 升到 {after} nat（困惑度 {pbefore} → {pafter}）{where}。",
    ),
    "summary.loss-stayed": (
        "Held-out loss stayed at {after} nats per learned token (perplexity {pafter}){where}.",
        "留出集损失保持在每学习词元 {after} nat（困惑度 {pafter}）{where}。",
    ),
    "summary.loss-rows": (
        ", measured on {rows} that were not trained on",
        "，在 {rows}未参与训练的数据上测得",
    ),
    "summary.accuracy-unknown": ("Held-out accuracy was not measured.", "没有测量留出集准确率。"),
    "summary.accuracy-before": (
        "Held-out accuracy before training is {share}; the other measurement is missing.",
        "训练前留出集准确率为 {share}；缺少训练后的测量。",
    ),
    "summary.accuracy-after": (
        "Held-out accuracy after training is {share}; the other measurement is missing.",
        "训练后留出集准确率为 {share}；缺少训练前的测量。",
    ),
    "summary.accuracy-rose": (
        "Held-out accuracy rose from {before} to {after}{where}; {certainty}.",
        "留出集准确率从 {before} 升到 {after}{where}；{certainty}。",
    ),
    "summary.accuracy-fell": (
        "Held-out accuracy fell from {before} to {after}{where}; {certainty}.",
        "留出集准确率从 {before} 降到 {after}{where}；{certainty}。",
    ),
    "summary.accuracy-stayed": (
        "Held-out accuracy stayed the same at {after}{where}; {certainty}.",
        "留出集准确率保持在 {after}{where}；{certainty}。",
    ),
    "summary.on-prompts": (", measured on {prompts}", "（{prompts}）"),
    "summary.certainty-unknown": ("how sure that is, is not known", "其可信程度未知"),
    "summary.beyond-chance": (
        "the change is larger than chance explains (95 %)",
        "变化超出偶然所能解释的范围（95 %）",
    ),
    "summary.within-chance": (
        "a change of this size can be chance (95 %)",
        "这样大小的变化可能出于偶然（95 %）",
    ),
    "summary.constant": (
        ", and always giving the best constant answer would score {share}",
        "；始终给出最佳固定答案可得 {share}",
    ),
    "summary.no-step": (
        "No step was finished, so there is no step time.",
        "没有完成任何一步，因此没有步耗时。",
    ),
    "summary.cost-training": (
        "A step takes {time} on average; the largest part is {stage} ({meaning}) with {share}, and {rest} of the "
        "time is not training.",
        "平均每步 {time}；占比最大的是{stage}（{meaning}），为 {share}；{rest} 的时间不是训练。",
    ),
    "summary.cost-other": (
        "A step takes {time} on average; the largest part is {stage} ({meaning}) with {share}, while training itself "
        "is {trained}: the other {rest} is not training.",
        "平均每步 {time}；占比最大的是{stage}（{meaning}），为 {share}，而训练本身只占 {trained}："
        "其余 {rest} 不是训练。",
    ),
    "summary.trust": (
        "The ledger accounts for {steps} of the steps' wall time.",
        "账本说明了各步 {steps} 的实际时间。",
    ),
    "summary.trust-run": (
        "The ledger accounts for {steps} of the steps' wall time and {run} of the whole run.",
        "账本说明了各步 {steps} 的实际时间，以及整个运行的 {run}。",
    ),
}
