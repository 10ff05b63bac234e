"""Every series of metrics.jsonl: key, unit, formula. docs/series.md is this table (a test keeps it so).

Names are verl's where verl has one. `view` says through what the model was seen: "codec" readings are
readings of the lens and never decide a verdict; "dense" ones are codec-off; "none" needs no model.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Series:
    """One logged number a step."""

    key: str
    unit: str
    view: Literal["codec", "dense", "both", "none"]
    formula: str


SERIES: tuple[Series, ...] = (
    Series("step", "steps", "none", "rollout step, from 1; a line with step 0 holds the first validation"),
    Series("critic/score/mean", "score", "dense", "mean of the reward over the step's rollouts"),
    Series("critic/score/max", "score", "dense", "largest reward"),
    Series("critic/score/min", "score", "dense", "smallest reward"),
    Series("critic/advantages/max", "1", "dense", "largest A = (score - group mean) / (group std + 1e-6)"),
    Series("critic/advantages/min", "1", "dense", "smallest A"),
    Series("val/score", "score", "dense", "mean reward of greedy answers to the held-out problems"),
    Series("groups/all_equal_count", "groups", "none", "groups whose rewards are all equal: A is exactly 0"),
    Series("step/noop", "0 or 1", "none", "1 when every group is all equal: no update is made"),
    Series("response_length/mean", "tokens", "dense", "mean response tokens, the EOS included"),
    Series("response_length/max", "tokens", "dense", "longest response"),
    Series("response_length/min", "tokens", "dense", "shortest response"),
    Series("response_length/clip_ratio", "share", "dense", "responses cut at sampling.max_new_tokens"),
    Series("prompt_length/mean", "tokens", "none", "mean prompt tokens"),
    Series("response/unparseable_share", "share", "dense", "responses without a readable answer"),
    Series("response/empty_count", "rows", "dense", "responses that are empty or blank"),
    Series("actor/entropy", "nats", "codec", "token mean of -sum p log p in the old pass"),
    Series("actor/loss", "1", "codec", "sum of the weighted loss terms, mean over ticks"),
    Series("actor/pg_loss", "1", "codec", "A < 0 ? min(-3A, M) : M, M = max(-A r, -A clip(r, 0.8, 1.2))"),
    Series("actor/kl_loss", "nats", "codec", "clamp(e^d - d - 1, +-10), d = clamp(ref - new, +-20) (k3)"),
    Series("actor/kl_unclamped", "nats", "codec", "token mean of e^d - d - 1 without the clamps"),
    Series("actor/kl_clamped_share", "share", "codec", "tokens whose k3 was clamped at 10"),
    Series("actor/entropy_loss", "nats", "codec", "entropy in the training pass, aggregated as the loss"),
    Series("actor/view_alignment_loss", "nats", "codec", "-log v of the sampler's tokens, as the loss"),
    Series("actor/pg_clipfrac", "share", "codec", "tokens with -A clip(r) > -A r: above + below"),
    Series("actor/pg_clipfrac/above_range", "share", "codec", "of them A > 0 and r > 1 + clip_high"),
    Series("actor/pg_clipfrac/below_range", "share", "codec", "of them A < 0 and r < 1 - clip_low"),
    Series("actor/pg_clipfrac_lower", "share", "codec", "tokens with M > -cA and A < 0 (dual clip)"),
    Series("actor/ppo_kl", "nats", "codec", "token mean of old - new, mean over ticks"),
    Series(
        "actor/first_tick_ppo_kl", "nats", "codec", "the same in the first tick: 0 exactly, or r is not 1"
    ),
    Series("actor/grad_norm", "1", "codec", "global norm before clipping, after the merge, mean over ticks"),
    Series("actor/lr", "1", "none", "learning rate of the step"),
    Series("actor/num_updates", "ticks", "none", "optimizer ticks of the step"),
    Series("rollout_corr/kl", "nats", "both", "THE GAP: token mean of rollout - old"),
    Series("rollout_corr/k3_kl", "nats", "both", "token mean of e^x - x - 1, x = old - rollout"),
    Series("rollout_corr/training_ppl", "1", "codec", "mean over rows of exp(-row mean of old)"),
    Series("rollout_corr/training_log_ppl", "nats", "codec", "mean over rows of -row mean of old"),
    Series("rollout_corr/rollout_ppl", "1", "dense", "mean over rows of exp(-row mean of rollout)"),
    Series("rollout_corr/rollout_log_ppl", "nats", "dense", "mean over rows of -row mean of rollout"),
    Series("rollout_corr/log_ppl_diff", "nats", "both", "mean over rows of log_ppl(old) - log_ppl(rollout)"),
    Series("rollout_corr/log_ppl_abs_diff", "nats", "both", "mean over rows of its magnitude"),
    Series("rollout_corr/log_ppl_diff_max", "nats", "both", "its largest row"),
    Series("rollout_corr/log_ppl_diff_min", "nats", "both", "its smallest row"),
    Series("rollout_corr/ppl_ratio", "1", "both", "mean over rows of exp(log_ppl_diff)"),
    Series("rollout_corr/chi2_token", "1", "both", "token mean of e^(2x) - 1, x = old - rollout"),
    Series("rollout_corr/chi2_seq", "1", "both", "mean over rows of e^(2 sum x) - 1"),
    Series("probe/kl_dense", "nats", "dense", "unclamped k3 of KL(current || reference), before the update"),
    Series("probe/entropy_dense", "nats", "dense", "token mean of the entropy, codec off"),
    Series("probe/kl_gain", "1", "both", "codec-view k3 of the same weights and tokens (clamped) / kl_dense"),
    Series("probe/held_kl", "nats", "dense", "k3 of KL(reference || current) on the fixed batch"),
    Series("probe/held_entropy", "nats", "dense", "token mean of the entropy on the fixed batch, codec off"),
    Series("probe/score_greedy", "score", "dense", "greedy score on the fixed batch (probe.greedy)"),
    Series("probe/rollout_logprob", "nats", "dense", "E log pi: token mean of rollout"),
    Series("probe/old_logprob", "nats", "codec", "E log v: token mean of old; the gap is E log pi - E log v"),
    Series("probe/gap_policy_part", "nats", "dense", "E log pi now minus at step 1"),
    Series(
        "probe/gap_view_part", "nats", "codec", "E log v at step 1 minus now; both add to the gap's change"
    ),
    Series("movement/relative_change", "1", "none", "|W_t - W_0|_F / |W_0|_F, all weights, after the step"),
    Series("movement/cosine", "1", "none", "<W_t, W_0> / (|W_t|_F |W_0|_F), all weights as one vector"),
    Series("movement/changed_bf16_share", "share", "none", "weights with bf16(W_t) != bf16(W_0)"),
    Series("movement/spectral_norm_max", "1", "none", "largest |W_t - W_0|_2 of a matrix"),
    Series(
        "movement/center_of_mass", "blocks", "none", "sum_l l |dW_l|^2 / sum_l |dW_l|^2, block index l from 0"
    ),
    Series("error_growth/norm_<boundary>", "1", "codec", "|S_T|, S_T = sum of e_t, e_t = mean of h~ - h"),
    Series("error_growth/step_norm", "1", "codec", "|e_T|, mean over boundaries"),
    Series("error_growth/cosine", "1", "codec", "cos(e_T, e_{T-1}), mean over boundaries"),
    Series(
        "error_growth/exponent",
        "1",
        "codec",
        "H of |S_{s+l} - S_s| ~ l^H over 32 steps: 1/2 redrawn, 1 the same every step; mean over boundaries",
    ),
    Series("wire/forward_bytes", "bytes", "codec", "old, reference and training passes, padding included"),
    Series("wire/backward_bytes", "bytes", "codec", "gradients of the training passes"),
    Series(
        "wire/anchor_bytes", "bytes", "dense", "the anchor's dense passes: 1, with a gradient 2 or 3 (KL)"
    ),
    Series("wire/probe_bytes", "bytes", "dense", "the codec-off probe: two dense passes over its tokens"),
    Series("wire/side_channel_bytes", "bytes", "none", "learned states published in the step"),
    Series("wire/dense_bytes", "bytes", "none", "forward and backward at 2 bytes a value"),
    Series("wire/bits_per_value", "bits", "none", "wire bits a token a boundary over the width"),
    Series("anchor/fired", "0 or 1", "none", "1 when the anchor fired before this step's old pass"),
    Series("codec/version", "fires", "none", "version of the learned states the step used, 0 for none"),
    Series("controller/demand", "1", "none", "what the controller asks of its actuators, 0 = nothing"),
    Series("controller/view_alignment_weight", "1", "none", "setting the step ran with (controller on)"),
    Series("controller/kl_coefficient", "1", "none", "setting the step ran with"),
    Series("controller/learning_rate_scale", "1", "none", "setting the step ran with"),
    Series("controller/anchor_cadence", "steps", "none", "setting the step ran with"),
    Series("controller/bits_per_value", "bits", "none", "setting the step ran with, once it was moved"),
    Series("controller/codec_off", "0 or 1", "none", "1 when the step ran dense"),
    Series("controller/extra_anchor", "0 or 1", "none", "1 when an alarm fired the anchor before the step"),
    Series("timing_s/sampling", "s", "none", "dense sampling"),
    Series("timing_s/reward", "s", "none", "decoding, scoring, advantages"),
    Series("timing_s/anchor", "s", "none", "the anchor's pass and learning"),
    Series("timing_s/old", "s", "none", "old pass"),
    Series("timing_s/reference", "s", "none", "reference pass"),
    Series("timing_s/probe", "s", "none", "codec-off reading"),
    Series("timing_s/forward", "s", "none", "training forward passes and their losses"),
    Series("timing_s/backward", "s", "none", "training backward passes"),
    Series("timing_s/update", "s", "none", "merge, clipping, optimizer"),
    Series("timing_s/step", "s", "none", "the whole step without validation and logging"),
    Series("timing_s/movement", "s", "none", "reading the weights' movement, after the step"),
    Series("timing_s/validation", "s", "none", "greedy validation"),
    Series("memory/peak_rss_bytes", "bytes", "none", "peak resident memory of the process so far"),
)


def markdown() -> str:
    """The table of docs/series.md."""
    head = "| key | unit | seen through | formula |\n|---|---|---|---|\n"
    rows = (
        f"| `{s.key}` | {s.unit} | {s.view} | {s.formula.replace('|', chr(92) + '|')} |\n" for s in SERIES
    )
    return head + "".join(rows)
