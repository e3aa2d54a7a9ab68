"""What each algorithm publishes for the fields of `algorithm` that a recipe leaves unset.

Where a paper gives no number, the comment says whose is used. `overlong_cache` is 0 everywhere: it is a length, and
only means something beside the recipe's `rollout.max_new_tokens`.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3; clip range of PPO (Schulman et al. 2017)
    "grpo": {
        "advantage": "group_norm",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "seq-mean-token-mean",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
    # Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783): neither the group's standard deviation
    # nor a response's own length divides
    "dr_grpo": {
        "advantage": "group_center",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "seq-mean-token-sum-norm",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
    # Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740): the whole response is one action, so its tokens' losses
    # add up. The paper does not clip; PPO's range acts only from a rollout's second update on
    "rloo": {
        "advantage": "leave_one_out",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "seq-mean-token-sum",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
    # Hu et al. 2025, REINFORCE++ (arXiv 2501.03262): advantages normalised over the batch, PPO's clipped loss averaged
    # over a response. The paper's KL in the reward is set by kl_coefficient and kl_placement
    "reinforce_plus_plus": {
        "advantage": "batch_whiten",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "seq-mean-token-mean",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
    # Yu et al. 2025, DAPO (arXiv 2503.14476): 0.2 and 0.28, token-level loss, dynamic sampling. Its over-long cache is
    # 4,096 of 20,480 tokens: set overlong_cache to a fifth of rollout.max_new_tokens for the same shape
    "dapo": {
        "advantage": "group_norm",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "aggregation": "token-mean",
        "overlong_cache": 0,
        "dynamic_sampling": True,
    },
    # Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071), section 5.1: 3e-4 and 4e-4
    "gspo": {
        "advantage": "group_norm",
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "aggregation": "seq-mean-token-mean",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
    # Chen et al. 2025, MiniMax-M1 (arXiv 2506.13585), eq. 4: no lower bound (clip_low 1 puts it at 0), token-level
    # mean. It gives no upper bound; weights up to 5 are those of ScaleRL (Khatri et al. 2025, arXiv 2510.13786)
    "cispo": {
        "advantage": "group_norm",
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "dual_clip": None,
        "aggregation": "token-mean",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
    # Schulman et al. 2017, PPO (arXiv 1707.06347): clip range 0.2, and GAE with lambda 0.95; the value's clip of 0.2 is
    # that of its code (OpenAI Baselines, PPO2). For language models Ouyang et al. 2022, InstructGPT (arXiv 2203.02155,
    # appendix C.4), keep these and do not discount. Those are the defaults of gae_lambda, value_clip and gamma in the
    # schema. Whitened advantages and a mean over tokens: Stiennon et al. 2020 (arXiv 2009.01325), in their code
    "ppo": {
        "advantage": "gae",
        "loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "token-mean",
        "overlong_cache": 0,
        "dynamic_sampling": False,
    },
}
