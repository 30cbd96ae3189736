"""`trimtab.Learner`: the primitives of training, for loops of one's own (docs/learner.md).

One process, one device. The engine that samples reads the weights that are trained, in place: what was sampled after an
`optim_step` comes from the new weights, and nothing is copied. Calls are synchronous.

What it leaves out: several processes, a learning rate schedule, data, logs. The jobs have those (`trimtab.grpo` and its
like).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.api.arguments import suggested
from trimtab.api.learner_losses import Gathered, Loss, Passes, chosen, is_number
from trimtab.api.learner_rollouts import (
    LIMITS,
    SAMPLING,
    Asked,
    Prompt,
    Prompts,
    Turns,
    play,
    rooms,
    sampling_of,
    seeds_of,
)
from trimtab.api.learner_state import (
    Built,
    Reference,
    build,
    options_of,
    plain_options,
    read_model,
    read_state,
    restore_optimizer,
    set_names,
    write_state,
)
from trimtab.api.run import call_errors
from trimtab.api.samples import Episode, Rows, Sample, as_list, temperature_of
from trimtab.config.jobs import LearnerOptions
from trimtab.data.tokenizer import texts_of
from trimtab.distributed.random_state import RandomStream
from trimtab.envs.types import Message
from trimtab.errors import UserError
from trimtab.files import writing
from trimtab.models.save import save_model
from trimtab.rollout.engine import Engine
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import SamplingParams, request_seed, stop_tokens


class Learner:
    """A model that samples and learns, step by step, on this machine's device.

    >>> learner = trimtab.Learner("my-model", lora_rank=16, learning_rate=1e-5)
    >>> samples = learner.sample(["2 + 2 ="], n=4, max_new_tokens=8)
    >>> rewards = [float("4" in sample.text) for sample in samples]
    >>> for sample, advantage in zip(samples, trimtab.advantages(rewards, group=4)):
    ...     sample.advantages = advantage
    >>> learner.forward_backward(samples, "ppo")
    >>> learner.optim_step()

    model          a folder, a name on the hub, or a loaded causal LM of transformers, which is trained in place
    tokenizer      of a loaded model; without one, prompts are token ids. A named model brings its own
    lora_rank      above 0: adapters of this rank are trained, and nothing else
    bf16           bfloat16 working weights with float32 masters; unset: on an accelerator that has bfloat16
    learning_rate  of `optim_step`, where it is not told another
    seed           of everything that is drawn; your own random numbers are left alone
    reference      another model to compare with; unset: the model as it was before anything was learnt
    **options      flags of the commands, checked alike: max_norm, l2, adam_betas, lora_alpha, lora_dropout,
                   target_modules, gradient_checkpointing, adam_offload, pass_tokens, rollout_slots and others
    """

    version: int
    """How many updates the weights have had; every sampled token carries the one that drew it."""
    tokenizer: Any
    """The model's tokenizer, or None."""

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        lora_rank: int = 0,
        bf16: bool | None = None,
        learning_rate: float = 1e-6,
        seed: int = 0,
        reference: str | Path | None = None,
        **options: Any,
    ):
        given = options | {"lora_rank": lora_rank, "learning_rate": learning_rate, "seed": seed}
        with call_errors(LearnerOptions, {"pretrain": "model"}):
            built = build(model, tokenizer, options_of(model, bf16, given))
        self._begin(built, None if reference is None else str(reference), own_tokenizer=tokenizer is not None)

    def _begin(self, built: Built, reference: str | None, *, own_tokenizer: bool) -> None:
        self.options, self.tokenizer, self.device = built.options, built.tokenizer, built.device
        self.name, self.learning_rate = built.name, built.options.learning_rate
        self.version = 0
        self._policy, self._optimizer, self._own_tokenizer = built.policy, built.optimizer, own_tokenizer
        self._loaded = built.loaded
        self._reference = Reference(built.options, built.loaded, built.device, reference)
        self._prompts = Prompts(built.tokenizer)
        self._passes = Passes(built.policy, built.optimizer, built.device, built.options.pass_tokens)
        self._stream = RandomStream(built.options.seed)
        self._turns = Turns()
        self._engine: Engine | None = None
        self._draws = 0  # calls that drew
        self._gathered = Gathered()

    def __repr__(self) -> str:
        adapters = f", lora_rank={self.options.lora_rank}" if self.options.lora_rank else ""
        precision = "bf16" if self.options.bf16 else "fp32"
        return f"Learner({self.name!r}, {precision}{adapters}, {self.device.name}, version={self.version})"

    # ---- answers

    def sample(
        self, prompts: Sequence[Prompt], n: int = 1, *, seeds: Sequence[int] | None = None, **sampling: Any
    ) -> list[Sample]:
        """Answers drawn with the weights as they are: `n` to each prompt, those to one prompt beside each other.

        prompts     a list. Each is a text as it stands, a list of messages for the chat template, or token ids
        seeds       one for each prompt, from which its answers draw; unset: every call draws anew from the Learner's
        **sampling  max_new_tokens (128), temperature (1), top_p, top_k, min_p, min_new_tokens, repetition_penalty,
                    stop_strings, stop_token_ids (unset: the model's end tokens), logit_bias, forbidden_tokens

        Log-probabilities are the model's own at the sampling temperature, over the whole vocabulary.
        """
        asked = self._prompts.encode(prompts)
        setting = self._sampling(n, sampling)
        if seeds is not None:
            seeds = seeds_of(seeds, len(asked))
        with self._turns.call():
            stream = self._next_stream()
            if seeds is None:
                seeds = [request_seed(stream, place) for place in range(len(asked))]
            engine = self._working_engine()
            limits = rooms(asked, setting, engine.context)
            rollouts = engine.generate(asked, setting, seeds=seeds, limits=limits)
            engine.trim_memory()
        texts = [""] * len(rollouts)
        if self.tokenizer is not None:
            texts = texts_of(self.tokenizer, [rollout.ids for rollout in rollouts])
        temperature = setting.temperature or 1.0
        return [Sample.of(rollout, text, temperature) for rollout, text in zip(rollouts, texts)]

    def play(self, environment: Any, tasks: int | Sequence[Asked], n: int = 1, **limits: Any) -> list[Episode]:
        """Episodes of an environment: `n` of each task, those of one task beside each other.

        environment  "FILE.py" or "FILE.py:NAME" in processes of its own, "gem:NAME", "rg:NAME", "verifiers:MODULE",
                     "trimtab:guess"; or a class of any shape that docs/agents.md knows, played in this process
        tasks        a list of `trimtab.Task`, of rows (dicts with prompt, label and more) or of prompts; or how many
                     the environment is to bring itself
        **limits     as the flags of the commands: max_turns, episode_max_len, observation_max_len, env_timeout,
                     env_retries and others; and how turns are drawn, as in `sample`: max_new_tokens, temperature, ...

        To train on them: `[sample for episode in episodes for sample in episode.samples]`.
        """
        for name in limits:
            if name not in LIMITS and name not in SAMPLING:
                raise UserError(f"play has no limit {name!r}; {suggested(name, [*LIMITS, *SAMPLING])}")
        drawing = {name: value for name, value in limits.items() if name in SAMPLING}
        bounds = {name: value for name, value in limits.items() if name in LIMITS}
        setting = self._sampling(n, drawing)
        with self._turns.call():
            engine = self._working_engine()
            found = play(engine, self._prompts, environment, tasks, setting, bounds, self._next_stream())
            engine.trim_memory()
        return found

    # ---- learning

    def log_probs(self, data: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        """Log-probabilities of every sample's trained tokens, by the model as it is, or by the reference.

        At the temperature that the samples were drawn at. The reference is the model as it was before anything was
        learnt (with adapters: the model without them), unless the Learner was made with another.
        """
        found = as_list(data)
        rows, temperature = self._rows(found), temperature_of(found)
        with self._turns.call():
            if not reference:
                return self._passes.score(rows, temperature, self._policy)
            with self._reference.at_work() as model:
                return self._passes.score(rows, temperature, model)

    def forward_backward(
        self,
        data: Sequence[Sample],
        loss: str | Loss | Callable[..., Any] = "ppo",
        *,
        group: int | None = None,
        entropy: bool = False,
        **config: Any,
    ) -> dict[str, float]:
        """Add the gradients of a loss to those gathered since the last `optim_step`.

        loss      "ppo", "gspo", "cispo", "sapo", "gmpo", "policy_gradient" (or "reinforce"), "sft" (or
                  "cross_entropy"), "dpo" (chosen and rejected in turn); or a function of `trimtab.LossInputs` that
                  gives a sum over tokens, and figures
        group     so many samples beside each other are seen by the function together; others may be in another pass
        entropy   give the function the policy's entropy at each token
        **config  settings of the loss: eps_clip, eps_clip_low_high, dual_clip, sapo_temperatures, kl_coef,
                  kl_estimator, entropy_loss_coef, token_reduction ("token_sum" or "token_mean"), beta

        Comes back: `loss` and other figures as means over the trained tokens ("dpo": over the pairs), `tokens` and
        `answers`. Samples without a trained token are left out. Data in several calls, or in one, are the same step.
        Where the loss itself raises, what was gathered is forgotten.
        """
        found = as_list(data)
        picked = chosen(loss, config)
        if entropy and not picked.entropy:
            picked = replace(picked, entropy=True)
        together = picked.together if group is None else group
        if not isinstance(together, int) or together < 1 or len(found) % together:
            raise UserError(
                f"group is {together!r}, and there are {len(found)} samples; give a number that divides them"
            )
        if together % picked.together:
            raise UserError(
                f"group is {together}, and loss {loss!r} sees {picked.together} samples together; leave it out"
            )
        columns = picked.columns or tuple(name for name in set_names(found) if name != "weights")
        rows, temperature = self._rows(found, "weights", *columns), temperature_of(found)
        tokens, answers = int(rows.lengths_S.sum()), _answers(found)
        if not tokens:
            raise UserError("no sample has a trained token, so there is nothing to learn from")
        if together > 1 and not bool(rows.lengths_S.all()):
            raise UserError("a sample has no trained token, and samples are seen together; leave its group out")
        with self._turns.call(), self._stream.drawing():
            before, self._gathered = self._gathered, Gathered()
            try:
                sums = self._passes.learn(rows, found, picked, temperature, together=together, gathered=before.begun)
            except BaseException:
                self._optimizer.clear_gradients()
                raise
            finite = before.finite and math.isfinite(sums["loss"])
            self._gathered = Gathered(True, before.tokens + tokens, before.answers + answers, finite)
        parts = tokens if picked.together == 1 else len(found) // picked.together
        return {name: value / parts for name, value in sums.items()} | {"tokens": tokens, "answers": answers}

    def optim_step(self, *, learning_rate: float | None = None, per: str | float = "tokens") -> dict[str, float]:
        """One step of AdamW with what was gathered, which is then forgotten.

        learning_rate  of this step; unset: the Learner's
        per            what the gathered sums are divided by: their trained "tokens", their "answers", or a number

        Comes back: `grad_norm` before clipping (max_norm), `applied` (False: a loss or gradient was not finite, and
        nothing moved), `learning_rate`.
        """
        if not self._gathered.begun:
            raise UserError("nothing was gathered since the last optim_step; call forward_backward first")
        rate = self.learning_rate if learning_rate is None else learning_rate
        if not is_number(rate) or rate < 0:
            raise UserError(f"learning_rate is {rate!r}; a number of at least 0 is needed")
        divisor = self._gathered.divisor(per)
        with self._turns.call():
            self._reference.before_update()
            report = self._optimizer.apply(float(rate), divisor=divisor, finite=self._gathered.finite)
            self._gathered = Gathered()
            if report.applied:
                self.version += 1
                if self._engine is not None:
                    self._engine.weights_changed(self.version)
        return {"grad_norm": report.grad_norm, "applied": report.applied, "learning_rate": float(rate)}

    def demonstration(self, conversation: Sequence[Message] | tuple[str, str]) -> Sample:
        """A sample to learn from by the loss "sft": a list of messages whose last is the assistant's, or a prompt and
        its answer as texts. The answer is trained, with the token that ends it."""
        ids, trained = self._prompts.demonstration(conversation, "the conversation")
        sample = Sample(ids, trained)
        sample.text = texts_of(self.tokenizer, [sample.trained_ids])[0]
        return sample

    # ---- on disk, and to others

    def save(self, folder: str | Path) -> None:
        """Everything needed to go on exactly: `Learner.load(folder)` has the same weights, optimizer, gathered
        gradients and random numbers. What an earlier save left in the folder is replaced."""
        with self._turns.call():
            state = {
                "counters": {"step": self.version, "draws": self._draws},
                "gathered": vars(self._gathered),
                "options": plain_options(self.options) | {"bf16": self.options.bf16},
                "learning_rate": self.learning_rate,
                "weights": self._loaded.weights,
                "reference": self._reference.name,
                "name": self.name,
                "random": self._stream.state(),
                "pass_limit": vars(self._passes.limit),
            }
            model = self._reference.kept or self._policy if self.options.pretrain is None else None
            tokenizer = self.tokenizer if self._own_tokenizer else None
            write_state(Path(folder).expanduser(), self._optimizer, state, model, tokenizer)

    @classmethod
    def load(cls, folder: str | Path) -> "Learner":
        """The Learner that `save` wrote: what it does next is what the other would have done.

        >>> learner = trimtab.Learner.load("my-learner")
        """
        folder = Path(folder).expanduser()
        state = read_state(folder)
        model, tokenizer, options = read_model(folder, state)
        built = build(model, tokenizer, options_of(model, options.pop("bf16"), options))
        if isinstance(model, str) and built.loaded.weights != state["weights"]:
            raise UserError(f"load: {model} has other weights than when the Learner was made from it")
        learner = cls.__new__(cls)
        learner._begin(built, state["reference"], own_tokenizer=tokenizer is not None)
        learner.name, learner.learning_rate = state["name"], state["learning_rate"]
        learner._reference.before_update()
        restore_optimizer(folder, built.optimizer)
        learner.version, learner._draws = state["counters"]["step"], state["counters"]["draws"]
        learner._gathered = Gathered(**state["gathered"])
        learner._stream.restore(state["random"])
        vars(learner._passes.limit).update(state["pass_limit"])
        return learner

    def export(self, folder: str | Path) -> None:
        """The model as a Hugging Face folder, tokenizer and all; with adapters, the adapter (`trimtab lora-combine`
        merges it)."""
        with self._turns.call(), writing(f"export: cannot write {folder}"):
            save_model(self._policy, self.tokenizer, Path(folder).expanduser(), bf16=self.options.bf16)

    @contextlib.contextmanager
    def serve(self, port: int = 0, *, token: str | None = None) -> Iterator[str]:
        """The policy behind OpenAI's protocol on this machine's loopback, as `trimtab serve` (docs/serve.md).

        >>> with learner.serve() as base_url:
        ...     client = openai.OpenAI(base_url=base_url, api_key="any")

        Answers come from the weights as they are. Other calls of the Learner may be made meanwhile: requests wait, and
        go on after an `optim_step` with the new weights. `port`: 0 is any that is free; `token`: what requests must
        bring as their API key.
        """
        from trimtab.api.learner_rollouts import serving

        if self.tokenizer is None:
            raise UserError("serve needs a tokenizer: give the Learner one")
        if not isinstance(port, int):
            raise UserError(f"port is {port!r}; give a number, or 0 for any that is free")
        with self._turns.call():
            engine = self._working_engine()
        stops = stop_tokens(self._policy, self.tokenizer)
        about = {"name": self.name, "stops": stops, "seed": self.options.seed, "port": port, "token": token}
        with serving(engine, self._policy, self.tokenizer, self._turns, **about) as base_url:  # type: ignore[arg-type]
            yield base_url

    # ---- inside

    def _rows(self, data: Sequence[Sample], *columns: str) -> Rows:
        context = getattr(self._policy.config.get_text_config(), "max_position_embeddings", None)
        return Rows.of(data, self._policy.head.out_features, context, *columns)

    def _working_engine(self) -> Engine:
        """The built-in one, made when it is first asked: a Learner that only learns from data needs none."""
        if self._engine is None:
            options = self.options
            self._engine = build_engine(
                self._policy,
                self.tokenizer,
                max_num_seqs=options.rollout_slots,
                kv_tokens=options.rollout_kv_tokens,
                weight_only_int8=options.weight_only_int8,
            )
            self._engine.weights_changed(self.version)
        return self._engine

    def _next_stream(self) -> int:
        self._draws += 1
        return request_seed(self.options.seed, self._draws)

    def _sampling(self, n: int, wanted: dict[str, Any]) -> SamplingParams:
        return sampling_of(n, wanted, stop_tokens(self._policy, self.tokenizer), self._policy.head.out_features)


def _answers(data: Sequence[Sample]) -> int:
    """Those that something was drawn in; an episode in several sequences is one."""
    counted = [sample for sample in data if np.any(sample.trained)]
    return max(1, sum(sample.branch == 0 for sample in counted))
