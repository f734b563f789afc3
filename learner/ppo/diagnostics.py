"""What an update reports, each number explained in one place.

Names follow CleanRL where it has them, so that people can read them without a legend; the
legend is `METRICS` all the same. `TRL` has what TRL calls them. Where a number is called KL, its
estimator and its two policies are in its explanation; all are nats per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from learner.ppo.masks import masked_mean, masked_var

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "charts/learning_rate": "Learning rate of the adapter in this update.",
        "charts/value_learning_rate": "Learning rate of the value head in this update.",
        "charts/optimizer_step": "Optimizer steps made since training began.",
        "charts/updates": "Updates made since training began, this one included.",
        "charts/SPS": (
            "Tokens trained on per second of the update, scoring and all epochs included (one that "
            "was stopped early counts whole); 0 if it took no measurable time."
        ),
        "charts/update_s": "Seconds the update took, from the sample drawn to the new weights.",
        "losses/policy_loss": (
            "Clipped policy objective, importance weights included; mean per token over all "
            "minibatches of the update. Its sign says little: it starts near 0 with whitened "
            "advantages and falls as good replies become likelier."
        ),
        "losses/value_loss": (
            "Half the squared error of the value head, the clipped one if larger; mean per "
            "token. Rises when rewards change faster than the head learns them."
        ),
        "losses/entropy": (
            "Entropy of the policy before the update at the tokens it chose, nats per token, "
            "at the sampling temperature. A steady fall foretells replies that are all alike."
        ),
        "losses/old_approx_kl": (
            "KL of the policy before the update to the one in training, estimator k1, mean "
            "per token over the last epoch's minibatches, each before its step. May be negative."
        ),
        "losses/approx_kl": (
            "The same KL, estimator k3 (never negative): how far the steps before each "
            "minibatch had moved the policy; 0 if there was one step only. Above 1.5 times "
            "target_kl the update stops. What the whole update did is kl/update_k3."
        ),
        "losses/clipfrac": (
            "Share of tokens whose ratio left the clip range, over all minibatches. Near 0 "
            "the steps are timid, above 0.3 most of the gradient is cut off."
        ),
        "losses/dual_clipfrac": (
            "Share of tokens at the dual clip: bad replies that became much likelier."
        ),
        "losses/value_clipfrac": "Share of tokens at which the value clip decided.",
        "losses/explained_variance": (
            "1 - Var(return - value) / Var(return), with values from before the update: 1 is "
            "perfect, 0 no better than a constant, negative worse. Absent when all returns "
            "are equal. Like all numbers of the value head absent in modes without it."
        ),
        "losses/grad_norm": (
            "Norm of the adapter's gradient before clipping, mean over optimizer steps. "
            "Growing unrest is an early sign of collapse."
        ),
        "losses/value_grad_norm": "The same for the value head.",
        "losses/initial_ratio_error": (
            "Largest distance from 1 of a ratio in the first minibatch. 0 on a CPU; if it is "
            "not small, old and new log-probabilities are not computed alike."
        ),
        "kl/update_k1": (
            "KL of the policy before the update to the one after it, estimator k1, mean per "
            "token of every n-th sample (learner.measure_every). May be negative."
        ),
        "kl/update_k3": (
            "The same KL, estimator k3 (never negative): how far this update moved the policy, "
            "its last step included."
        ),
        "kl/reference_k1": (
            "KL of the policy before the update to the reference (the bare base model), "
            "estimator k1, mean per token: what the reward penalty is made of."
        ),
        "kl/reference_k3": "The same KL, estimator k3 (never negative).",
        "kl/reference_k1_per_sample": "The same KL, estimator k1, summed over each conversation.",
        "rewards/mean": "Mean reward per turn, before the KL penalty.",
        "rewards/nonzero_share": "Share of turns whose reward is not 0.",
        "rewards/kl_penalty": "KL penalty per conversation, taken off its rewards; mean.",
        "rewards/return": "Mean return per token: penalised rewards and values by GAE.",
        "rewards/advantage_std": "Standard deviation of the critic's advantages before whitening.",
        "advantages/mean": (
            "Mean advantage per token as the loss uses it: the mode's, or the blend of several."
        ),
        "advantages/std": "Its standard deviation; 0 means that the update taught nothing.",
        "grpo/judged_share": "Share of replies with a verdict (a reward other than 0).",
        "grpo/good_share": (
            "Share of good ones among them. At 0 or 1 the group says nothing about which reply "
            "is better, and all its advantages are 0."
        ),
        "opd/taught_share": "Share of tokens whose reply had a hint.",
        "opd/teacher_gap": (
            "Mean of log p_teacher - log p_old over these tokens, nats: how much the hint speaks "
            "against (below 0) or for what was said."
        ),
        "opd/bounded_share": "Share of them at which opd_advantage_bound cut the advantage.",
        "stale/importance_weight": (
            "Mean truncated weight of old to behaviour policy per token: 1 for fresh data."
        ),
        "stale/capped_share": "Share of tokens whose weight was cut at the cap.",
        "stale/clipped_share": (
            "Share of tokens whose ratio of old to behaviour policy is outside the clip range "
            "before the first step: what staleness alone would clip."
        ),
        "stale/dropped_share": (
            "Share of the window's tokens in segments that are not sampled because a version "
            "more than max_version_gap behind wrote in them."
        ),
        "stale/effective_sample_size": (
            "(sum w)^2 / (n sum w^2) of the truncated weights: 1 for fresh data; falling "
            "values foretell collapse from stale data."
        ),
        "stale/recorded_gap": (
            "Mean of |log p_old - log p_behaviour|, nats per token that came from the very version "
            "in training with its log-probability: 0 from our server in float32, hundredths in "
            "bfloat16. Above 0.1 the server reports others than those at the turn's temperature, "
            "and importance weights are wrong. Absent where there is no such token."
        ),
        "stale/share_recomputed_logprobs": (
            "Share of tokens without recorded log-probability, recomputed with the version "
            "that chose them."
        ),
        "stale/share_missing_logprobs": (
            "Share of tokens whose behaviour stays unknown: weight 1, as if chosen by the "
            "policy before the update."
        ),
        "warm_start/loss_before": (
            "Mean loss of the labelled examples before a warm start (of at most 256 of them)."
        ),
        "warm_start/loss_after": "The same after it; not lower means that it is rejected.",
        "warm_start/chosen_logprob_before": (
            "Mean log-probability of the better and the demonstrated replies before a warm start, "
            "nats per token."
        ),
        "warm_start/chosen_logprob_after": "The same after it.",
        "warm_start/margin_before": (
            "Mean margin of the pairs before a warm start, nats: how much clearer than the "
            "reference the policy prefers the chosen reply."
        ),
        "warm_start/margin_after": "The same after it.",
        "warm_start/accuracy_before": "Share of pairs with a margin above 0 before a warm start.",
        "warm_start/accuracy_after": "The same after it.",
        "warm_start/steps": "Optimizer steps of the warm start.",
        "warm_start/examples": "Examples it learned from.",
        "warm_start/left_out": "Examples longer than max_sequence_tokens.",
        "makeup/replies": "Replies of the segments that were trained on, those left out included.",
        "makeup/sources": "Sources (front ends) they came from.",
        "makeup/topics": "Topics they were about, by the attribute topic; none counts as one.",
        "makeup/versions": "Policy versions that wrote them; unknown counts as one.",
        "makeup/largest_source_share": "Share of the source with most of them.",
        "makeup/largest_topic_share": "Share of the topic with most of them.",
        "makeup/largest_version_share": "Share of the policy version with most of them.",
        "makeup/largest_session_share": "Share of the session with most of them.",
        "makeup/unknown_version_share": "Share of those that do not say which version wrote them.",
        "makeup/positive_share": "Share with a reward above 0.",
        "makeup/negative_share": "Share with a reward below 0.",
        "makeup/zero_share": "Share with a reward of 0, or none.",
        "makeup/imbalances": (
            "How many of the above lean too far (learner.imbalance_max_share, "
            "imbalance_min_sign_share); the version's attribute imbalance says which. Above 0 "
            "is an alarm."
        ),
        "batch/samples": "Conversations in the update.",
        "batch/turns": "Replies in the update.",
        "batch/tokens": "Tokens that were trained on.",
        "batch/context_tokens": "Tokens that were only read.",
        "batch/truncated_share": "Share of samples whose context was shortened to fit.",
        "batch/turns_too_long": (
            "Replies of the sampled segments that were left out because they do not fit into "
            "max_sequence_tokens even with the message they answer alone."
        ),
        "batch/turns_interrupted": (
            "Replies of the sampled segments that were context only because somebody else "
            "ended them."
        ),
        "batch/epochs": "Epochs begun; fewer than configured after an early stop.",
        "batch/optimizer_steps": "Optimizer steps of this update.",
        "batch/early_stop": "1 if approx_kl ended the update before its last step, else 0.",
    }
)
"""Every key an update may report, and what it means."""


TRL: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        # PPOTrainer
        "objective/kl": ("kl/reference_k1_per_sample", 1.0),
        "objective/non_score_reward": ("rewards/kl_penalty", -1.0),
        "objective/scores": ("rewards/mean", 1.0),
        "policy/approxkl_avg": ("losses/approx_kl", 1.0),
        "policy/clipfrac_avg": ("losses/clipfrac", 1.0),
        "policy/entropy_avg": ("losses/entropy", 1.0),
        "loss/policy_avg": ("losses/policy_loss", 1.0),
        "loss/value_avg": ("losses/value_loss", 1.0),
        "val/clipfrac_avg": ("losses/value_clipfrac", 1.0),
        "lr": ("charts/learning_rate", 1.0),
        # GRPOTrainer
        "kl": ("kl/reference_k3", 1.0),
        "entropy": ("losses/entropy", 1.0),
        "reward": ("rewards/mean", 1.0),
        "clip_ratio/region_mean": ("losses/clipfrac", 1.0),
        "grad_norm": ("losses/grad_norm", 1.0),
        "sampling/importance_sampling_ratio/mean": ("stale/importance_weight", 1.0),
    }
)
"""Names of TRL (1.12 PPOTrainer, 1.16 GRPOTrainer) for metrics of ours: which, times what.

The same quantity, with three differences: TRL's scores are per conversation, ours per reply;
its approxkl is estimator k2, ours k3; its entropy is that of the training pass, ours that of the
policy before the update.
"""


def trl_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """What there is of `metrics`, under TRL's names."""
    return {name: factor * metrics[ours] for name, (ours, factor) in TRL.items() if ours in metrics}


def render_table() -> str:
    """All metrics as a table in Markdown: our name, TRL's, and what it says."""
    theirs = {
        ours: [name for name, (of, _) in TRL.items() if of == ours] for ours, _ in TRL.values()
    }
    rows = [
        f"| `{name}` | {', '.join(f'`{one}`' for one in theirs.get(name, ()))} | {meaning} |\n"
        for name, meaning in METRICS.items()
    ]
    return "| name | in TRL | what it says |\n|---|---|---|\n" + "".join(rows)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """``1 - Var(R - V) / Var(R)`` over `mask`; None if all returns are equal.

    Args:
        values: ``[batch, time]``.
        returns: ``[batch, time]``.
        mask: Bool, ``[batch, time]``.
    """
    variance = float(masked_var(returns, mask))
    if variance <= 0.0:
        return None
    return 1.0 - float(masked_var(returns - values, mask)) / variance


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """``(sum w)^2 / (n sum w^2)`` over `mask`, in (0, 1]; Kong 1992.

    Args:
        weights: ``[batch, time]``, not negative.
        mask: Bool, ``[batch, time]``.
    """
    square_of_mean = float(masked_mean(weights, mask)) ** 2
    mean_of_squares = float(masked_mean(weights**2, mask))
    return square_of_mean / mean_of_squares if mean_of_squares > 0.0 else 1.0


__all__ = [
    "METRICS",
    "TRL",
    "effective_sample_size",
    "explained_variance",
    "render_table",
    "trl_metrics",
]
