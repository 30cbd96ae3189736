"""What a process of a split RL job has on its device while the built-in engine answers: all weights of the policy, of
cut layers its part, keys and values by the engine's own rule, and a pass over prompts."""

from typing import TYPE_CHECKING

from trimtab.config.rl_jobs import RLOptions
from trimtab.plan.memory import Part, drawing

if TYPE_CHECKING:
    from trimtab.plan.split.share import ProcessShare

ROLLOUT = ("rollout",)


def rollout_parts(share: "ProcessShare", held: int) -> list[Part]:
    """`held`: bytes that the process has anyway."""
    options, actor, rows = share.options, share.models[0], share.work.rows
    assert isinstance(options, RLOptions)
    prompts = -(-options.prompts_under_way // share.split.data)
    slots = min(options.rollout_slots, prompts * options.n_samples_per_prompt)
    engine = actor.engine_memory(options.rollout_kv_tokens)
    free = max(0, share.hardware.memory - held - actor.weights)
    size = engine.keys_and_values(slots, rows.longest, free) if free else 0
    read = actor.scoring_bytes(max(1, min(engine.max_num_batched_tokens, prompts * rows.prompt)))
    vocabulary = actor.whole.model.config.get_text_config().vocab_size
    return [
        Part("actor: weights, gathered to answer", actor.weights, ROLLOUT),
        Part(f"keys and values of {size // engine.token_bytes:,} tokens", size, ROLLOUT),
        Part("a pass over prompts, or drawing tokens", max(read, drawing(options, slots, vocabulary)), ROLLOUT),
    ]
