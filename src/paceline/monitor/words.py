"""What `paceline watch` says, in English and Chinese: of every text both, in one pair."""

from typing import Literal

Lang = Literal["en", "zh"]

ALARMS: dict[str, tuple[str, str]] = {
    "not_finite": ("{metric} is {value} in step {step}", "第 {step} 步的 {metric} 为 {value}"),
    "updates_skipped": (
        "{count} updates skipped for a gradient that is not finite in the last {steps} steps",
        "最近 {steps} 步有 {count} 次更新因梯度不是有限值而跳过",
    ),
    "out_of_memory": (
        "{count} mini-batches begun again because memory ran out in the last {steps} steps",
        "最近 {steps} 步有 {count} 个小批次因显存不足而重新开始",
    ),
    "reward_failures": (
        "{count} samples without a verdict in the last {steps} steps: the reward timed out or failed",
        "最近 {steps} 步有 {count} 个样本没有评分：评分超时或出错",
    ),
    "no_signal": (
        "all rewards of a step are equal, {steps} steps long: nothing to learn from",
        "连续 {steps} 步，每步内所有奖励都相同：没有可学习的信号",
    ),
    "exhausted": (
        "{count} times dynamic sampling gave up short of groups in the last {steps} steps",
        "最近 {steps} 步有 {count} 次动态采样未凑够组就放弃",
    ),
    "overlong": (
        "{count} samples longer than the token budget in the last {steps} steps",
        "最近 {steps} 步有 {count} 个样本长于词元预算",
    ),
    "checkpoint_waits": (
        "{count} saves waited for the one before to be written in the last {steps} steps",
        "最近 {steps} 步有 {count} 次保存需等待上一次写完",
    ),
    "truncated": (
        "{share} of the samples reach rollout.max_new_tokens",
        "{share} 的样本达到 rollout.max_new_tokens",
    ),
    "mfu": (
        "{metric}: {reason}",
        "{metric} 为 {value}，不可能：所用的 FLOPs、时间或峰值有误（进程重复计数、没有等待某个算子结束，"
        "或用了其他设备或类型的峰值）",
    ),
    "slower": (
        "steps take {now} s, {ratio} x the {before} s of earlier ones",
        "每步耗时 {now} s，是先前 {before} s 的 {ratio} 倍",
    ),
    "unequal_ranks": (
        "the busiest rank works {ratio} x the mean; in the last step it is rank {rank}",
        "最忙的进程的工作时间是平均值的 {ratio} 倍；最近一步为进程 {rank}",
    ),
    "logprobs_apart": (
        "sampled and scored log-probs are {nats} nats apart: rollout and training disagree on the policy",
        "采样与重算的对数概率相差 {nats} nat：生成与训练所用的策略不一致",
    ),
    "entropy_collapse": (
        "entropy fell from {first} to {last} nats: samples become alike",
        "熵由 {first} 降到 {last} nat：样本趋于雷同",
    ),
    "host_memory": (
        "host memory grew by {grown} GiB since the run was warm",
        "预热之后主机内存增长了 {grown} GiB",
    ),
    "unaccounted": ("{share} of the step lies in no stage", "每步有 {share} 的时间不属于任何阶段"),
    "silent": (
        "nothing was recorded for {seconds} s: the run hangs, evaluates for long, or its process is gone",
        "已有 {seconds} s 没有新记录：运行卡住、评测时间长，或进程已不存在",
    ),
    "died": (
        "the run's process is gone and has not said why: it was killed",
        "运行的进程已不存在，且没有说明原因：被强制终止",
    ),
}
"""Texts by alarm. What a failed run said of itself stays in its own words and is not here."""

PANEL: dict[str, tuple[str, str]] = {
    "ranks": ("{count} ranks", "{count} 个进程"),
    "rank": ("{count} rank", "{count} 个进程"),
    "step": ("step {step}", "第 {step} 步"),
    "step-of": ("step {step}/{all}", "第 {step}/{all} 步"),
    "left": ("time left {time}", "剩余 {time}"),
    "step-time": ("step time", "每步耗时"),
    "reward": ("reward", "奖励"),
    "accuracy/train": ("accuracy (train)", "准确率（训练）"),
    "eval/accuracy": ("accuracy (held out)", "准确率（留出）"),
    "loss/total": ("loss", "损失"),
    "eval/loss": ("held-out loss", "留出损失"),
    "entropy": ("entropy", "熵"),
    "grad_norm": ("gradient norm", "梯度范数"),
    "response_length/mean": ("response length", "回答长度"),
    "throughput/tokens_per_s": ("throughput", "吞吐量"),
    "throughput/tokens_per_s_per_device": ("  per device", "  每设备"),
    "throughput/generated_tokens_per_s": ("  generated", "  生成"),
    "mfu/step": ("MFU (step)", "MFU（整步）"),
    "mfu/update_actor": ("MFU (update_actor)", "MFU（策略更新）"),
    "tokens/effective_share": ("effective tokens", "有效词元"),
    "memory/peak_allocated": ("device memory", "显存"),
    "memory/peak_reserved": ("  reserved", "  已预留"),
    "memory/host_rss": ("host memory", "主机内存"),
    "nats": ("{value} nats", "{value} nat"),
    "tokens": ("{value} tokens", "{value} 个词元"),
    "tokens-per-s": ("{value} tokens/s", "{value} 词元/秒"),
    "stages": (
        "stages, mean of the last {steps} steps and all ranks",
        "各阶段，最近 {steps} 步与所有进程的平均",
    ),
    "bottleneck": ("bottleneck", "瓶颈"),
    "bottleneck-is": ("{stage}, bound by {cause}", "{stage}，受限于{cause}"),
    "no-alarms": ("no alarms", "没有告警"),
}
"""Texts of the panel; figures by the metric that they show. How the run stands is telemetry's to say."""


def say(texts: dict[str, tuple[str, str]], key: str, lang: Lang, **values: object) -> str:
    """A text with its values put in."""
    return texts[key][lang == "zh"].format(**values)
