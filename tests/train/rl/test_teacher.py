"""A teacher on the policy's own answers: gradients against autograd over whole logits, runs, and what is refused."""

import copy
import dataclasses
import json
import shutil
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import warm
from tests.tiny import tiny_model
from tests.train.job_run import NoStop, relative_difference, write_model, write_rows
from tests.train.rl.rl_run import arguments, assert_identical, at, result, rows, weights, without, write_task
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import InProcessGroup, RoleContext
from trimtab.distributed.mesh import Mesh
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.models import lm_head
from trimtab.models.load import load_policy
from trimtab.models.lora import adapters_off
from trimtab.models.policy import Policy, Teacher
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.optimizer import OptimizerStep
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher
from trimtab.train.rl.roles import actor_of, scorer
from trimtab.train.rl.teacher import TeacherPrompts, Teaching

VOCABULARY = len(make_tokenizer())
KINDS = ("reverse_kl", "forward_kl", "jsd")
# (prompt, teacher's prompt, answer); the first two answers share their prompt.
SAMPLES = [
    ([5, 6, 7], [5, 9, 9, 6, 7], [1, 2, 3]),
    ([5, 6, 7], [], [4, 5, 6, 7]),
    ([8, 9], [8, 3, 9, 1, 1, 2], [2]),
    ([4, 4, 3, 2], [4], [2, 3, 7, 8, 9]),
    ([4, 4, 3, 2], [9, 9, 9, 9], [1, 1]),
]
TOKENS = sum(len(answer) for *_, answer in SAMPLES)
ADVANTAGES = torch.linspace(-1, 1.5, TOKENS)


def plain_reverse(q, p):
    return (q * (q.log() - p.log())).sum()


def plain_forward(q, p):
    return -(p * q.log()).sum()


def trl_jsd(student, teacher, temperature):
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(student, teacher, beta=0.5, temperature=temperature, reduction="sum")


def divergence_of(kind, student, teacher, temperature):
    """Written out, but for JSD, which is TRL's."""
    if kind == "jsd":
        return trl_jsd(student, teacher, temperature)
    plain = {"reverse_kl": plain_reverse, "forward_kl": plain_forward}[kind]
    return plain((student / temperature).softmax(-1), (teacher / temperature).softmax(-1))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "model")
    write_model(folder / "teacher", seed=1, hidden_size=64, num_hidden_layers=1)
    write_model(folder / "padded", seed=2, vocab_size=VOCABULARY + 5)
    return folder


class Step:
    """Real roles in this process, an experience, and the gradient of one update."""

    def __init__(self, folder, *, teacher=None, path="packed", prompts=True, **options):
        fixed = {"micro_rollout_batch_size": 2, "init_kl_coef": 0.0, "n_samples_per_prompt": 2, "train_batch_size": 6}
        fixed |= {"rollout_batch_size": 3, "micro_train_batch_size": 2, "teacher_prompt_key": "hint" * prompts or None}
        model = None if teacher is None else str(folder / teacher)
        self.options = GRPOOptions(pretrain=str(folder / "model"), teacher_model=model, **fixed | options)
        device, mesh = find_device(), Mesh()
        place = RoleContext(device, mesh, NoStop())
        loaded = load_policy(self.options, device, mesh)
        self.actor = actor_of(self.options, loaded, load_tokenizer(str(folder / "model")), place)
        self.teacher = None
        if model is not None:
            base = loaded if self.options.teacher_is_base else None
            self.teacher = scorer(self.options, place, base, pretrain=None if base else model)
        for policy in {self.actor.model, *([self.teacher.reference.model] if self.teacher else [])}:
            policy.double().path = path  # the layers, so that rounding is that of the loss alone
            if path == "padded":
                policy.inner.set_attn_implementation("eager")
        if self.actor.average is not None:
            self.actor.average.averages = {n: x.double() for n, x in self.actor.average.averages.items()}
        self.actor.schedule(steps=10)
        self.groups = [
            InProcessGroup(n, role, device) for n, role in (("actor", self.actor), ("teacher", self.teacher))
        ]

    def experience(self):
        trajectories = [
            Trajectory(group, i, prompt, answer, np.full(len(answer), -1.0, dtype=np.float32), "stop")
            for i, ((prompt, _, answer), group) in enumerate(zip(SAMPLES, (0, 0, 1, 2, 2)))
        ]
        found = Experience.of([0, 0, 1, 2, 2], trajectories)
        found.advantages_N = torch.zeros(TOKENS)
        if self.options.teacher_prompt_key:
            found.teacher_prompts = [opening for _, opening, _ in SAMPLES]
        return found

    def gradient(self, *, advantages=None):
        batcher, experience = MicroBatcher(self.options), self.experience()
        if advantages is not None:
            experience.advantages_N = advantages
        teaching = Teaching(self.options, batcher, None)
        teaching.use(self.groups[0], self.groups[1] if self.teacher else None)
        samples = list(range(len(SAMPLES)))
        states = teaching.states(experience, samples)
        parts, totals = batcher.policy_update(self.groups[0], experience, samples, 0, states)
        found, optimizer = {}, self.actor.optimizer

        def keep(step, finite):
            found.update((n, optimizer._gradient(n, master).clone()) for n, master in optimizer.masters.items())
            optimizer.clear_gradients()
            return OptimizerStep(0.0, True)

        optimizer.step = keep
        report = self.actor.update(parts[0], totals=totals, step=0, kl_coefficient=0.0)
        return found, report


def plain_step(step, student, teacher, *, coefficient=1.0, advantages=None):
    """Autograd over the whole logits of two Hugging Face models in double precision, sample by sample."""
    options, total, before, policy = step.options, 0.0, 0, 0.0
    for prompt, opening, answer in SAMPLES:
        opening = (opening if options.teacher_prompt_key else None) or prompt
        ids, other = torch.tensor([prompt + answer]), torch.tensor([opening + answer])
        logits = student(input_ids=ids).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
        with torch.no_grad():
            taught = teacher(input_ids=other).logits[0, len(opening) - 1 : -1, :VOCABULARY]
        total = total + divergence_of(options.teacher_divergence, logits, taught, options.temperature)
        if advantages is not None:
            chosen = (logits / options.temperature).log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
            policy = policy - (chosen * advantages[before : before + len(answer)]).sum()
        before += len(answer)
    loss = (coefficient * total + policy) / TOKENS
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())))), float(total.detach()) / TOKENS


def double(policy):
    """A copy with Hugging Face's own attention."""
    model = copy.deepcopy(policy.model).double().eval()
    (model.get_base_model() if hasattr(model, "peft_config") else model).set_attn_implementation("eager")
    return model


def check_gradient(step, teacher, micro=(2,), **how):
    student = double(step.actor.model)
    theirs, distance = plain_step(step, student, teacher or student, **how)
    for count in micro:
        step.options = dataclasses.replace(step.options, micro_train_batch_size=count)
        ours, report = step.gradient(advantages=how.get("advantages"))
        assert report["distance"] == pytest.approx(distance, abs=1e-5)
        assert ours.keys() == theirs.keys() and max(float(g.abs().max()) for g in ours.values()) > 1e-3
        assert relative_difference(ours, theirs) < 1e-6, count


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_equals_autograd_over_all_logits(models, kind, temperature, path):
    settings = {"teacher_divergence": kind, "temperature": temperature}
    step = Step(models, teacher="teacher", path=path, prompts=False, **settings)
    check_gradient(step, double(step.teacher.reference.model), micro=(1, 2, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_teaches_itself_after_the_teachers_prompts(models, kind):
    check_gradient(Step(models, teacher_divergence=kind), None)


def test_rewards_and_a_teacher_add_up(models):
    step = Step(models, teacher="teacher", teacher_divergence="reverse_kl", teacher_coef=0.3)
    taught = double(step.teacher.reference.model)
    check_gradient(step, taught, coefficient=0.3, advantages=ADVANTAGES)


@pytest.mark.parametrize("head", [lm_head.chunk_tokens, lambda *_, **__: 4], ids=["one chunk", "token by token"])
def test_rows_that_only_pad_the_larger_vocabulary_are_left_out(models, monkeypatch, head):
    monkeypatch.setattr(lm_head, "chunk_tokens", head)
    step = Step(models, teacher="padded", teacher_divergence="reverse_kl")
    check_gradient(step, double(step.teacher.reference.model))


def test_the_average_of_the_weights_teaches_with_its_own_head(models):
    step = Step(models, teacher_divergence="jsd", enable_ema=True, teacher_ema=True)
    before = {name: p.clone() for name, p in step.actor.model.named_parameters()}
    for average in step.actor.average.averages.values():
        average.add_(torch.randn_like(average) * 0.1)
    with step.actor.average.in_place():
        teacher = double(step.actor.model)
    check_gradient(step, teacher)
    after = dict(step.actor.model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items()), "the policy has its own weights again"


def test_a_lora_student_learns_from_its_own_base_without_a_second_copy(models):
    step = Step(models, teacher="model", teacher_divergence="forward_kl", lora_rank=2)
    assert step.teacher.reference.model is step.actor.model
    with torch.no_grad():
        for name, parameter in step.actor.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
        for name, master in step.actor.optimizer.masters.items():
            master.copy_(step.actor.optimizer.working[name])
    teacher = double(step.actor.model)
    with adapters_off(teacher):
        check_gradient(step, teacher)


# ---- memory


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **keywords or {})
        found = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *found, 0)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_tokens_times_vocabulary(kind, monkeypatch):
    from tests.samples import batch_of
    from trimtab.algos.supervised_losses import divergence

    monkeypatch.setattr(lm_head, "KEPT", 0)
    vocabulary, tokens = 8192, 1500
    student, teacher = (Policy(tiny_model(vocab_size=vocabulary, seed=seed)) for seed in (0, 1))
    batch = batch_of([tokens])
    trained = int(batch.trained_tokens)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with Largest() as largest, keep:
        with torch.no_grad():
            hidden_ND = teacher(batch, hidden_only=True).hidden_ND
        out = student(batch, teacher=Teacher(hidden_ND, teacher.head, teacher.logit_shape, divergence(kind)))
        (out.divergence_N.mean() - out.log_probs_N.mean()).backward()
    weights = vocabulary * student.config.hidden_size
    assert out.divergence_N.shape == (trained,)
    assert largest.numel <= max(2**22, weights) < trained * vocabulary / 1.5
    assert max(saved) <= max(2**20, weights)


# ---- runs

HINTS = """
def hint(prompts, completions, rewards, label, **columns):
    assert len(prompts) == len(completions) == len(rewards) == len(label)
    return [p + [{"role": "user", "content": l}] if r < 1 else None for p, l, r in zip(prompts, label, rewards)]


def short(queries, prompts, labels):
    return ["a"]


def fails(prompts, completions, **columns):
    return [prompt[9] for prompt in prompts]


def mute(prompts, completions, **columns):
    return [[""] for _ in prompts]


def roleless(prompts, completions, **columns):
    return [None] * 3 + [[{"content": "?"}] for _ in prompts[3:]]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    compute_score.calls = getattr(compute_score, "calls", 0) + 1
    return [][0] if compute_score.calls > 5 else None


def long(prompts, completions, **columns):
    return [[{"role": "user", "content": "1" * 5000}] for _ in prompts]
"""
ALONE = "--init_kl_coef 0 --actor_learning_rate 1e-2"
ITSELF = "--teacher_prompt_key hint --enable_ema --teacher_ema --teacher_divergence jsd"
LAYOUTS = {
    "offloaded": "--ref_reward_offload",
    "copies": "--nproc 2",
    "sharded": "--nproc 2 --zero_stage 3",
    "sharded and offloaded": "--nproc 2 --zero_stage 3 --ref_reward_offload",
    "layers cut": "--nproc 2 --ds_tensor_parallel_size 2",
}
SELF = "--teacher_prompt_func {0}/hints.py:hint --enable_ema --teacher_ema --teacher_divergence reverse_kl"


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A task with a teacher, and a column that tells it the answer."""
    folder = write_task(tmp_path_factory.mktemp("taught"))
    write_model(folder / "teacher", seed=3, vocab_size=VOCABULARY + 2)
    given = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    write_rows(folder / "prompts.jsonl", [row | {"hint": told(row)} for row in given])
    (folder / "hints.py").write_text(HINTS)
    return folder


def told(row):
    return [*row["input"], {"role": "user", "content": row["label"]}]


def words_of(taught, out, *more, rewarded=False):
    words = arguments(taught, out, "grpo", *(part.format(taught) for part in more))
    return words if rewarded else without(words, "--reward_verifier", "--eval_dataset", "--eval_split", "--eval_steps",
                                          "--eval_n_samples_per_prompt", "--label_key")  # fmt: skip


@pytest.mark.short(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_alone_draws_the_policy_towards_itself(taught, tmp_path, kind):
    words = f"--teacher_model {{0}}/teacher --teacher_divergence {kind} --num_episodes 3 {ALONE}"
    printed = warm.output(words_of(taught, tmp_path, words))
    assert f"reward: 1 x {kind.replace('_', ' ')} (loss, all tokens) from the teacher" in printed
    found = [row["distance"] for row in rows(tmp_path)]
    assert found[-1] < 0.92 * found[0] and "teacher_kl" not in rows(tmp_path)[0]
    assert {row["reward"] for row in rows(tmp_path)} == {0.0} and not rows(tmp_path)[0]["alarms"][1:]


@pytest.mark.parametrize("kind", ["reverse_kl", "sampled"])
def test_a_policy_learns_to_answer_as_if_it_had_read_the_column(taught, tmp_path, kind):
    words = f"--teacher_prompt_key hint --teacher_divergence {kind} --gamma 0 {ALONE} --max_steps 3"
    words += " --advantage_estimator reinforce" * (kind == "sampled")
    printed = warm.output(words_of(taught, tmp_path, words, rewarded=True))
    assert "the policy as its own teacher" in printed
    found = [row["distance" if kind == "reverse_kl" else "teacher_kl"] for row in rows(tmp_path)[1:]]
    assert found[0] > 0.05, "the longer prompt says something"


@pytest.mark.long
def test_a_lora_student_learns_from_its_base_with_another_prompt(taught, tmp_path):
    words = f"--teacher_model {{0}}/model --teacher_prompt_key hint --lora_rank 4 --teacher_divergence jsd {ALONE}"
    assert warm.run(words_of(taught, tmp_path, words, "--num_episodes 3")) == 0
    found = [row["distance"] for row in rows(tmp_path)]
    assert found[-1] < found[0]


@pytest.mark.short(1)
@pytest.mark.parametrize("moment", [(2, "update", 1), pytest.param((1, "score", 0), marks=pytest.mark.long)], ids=str)
def test_a_killed_run_resumes_with_its_teacher(taught, uninterrupted, tmp_path, moment):
    words = words_of(taught, tmp_path, SELF, rewarded=True)
    assert warm.run(words, prepare=partial(at, moment, signal.SIGKILL)) == -signal.SIGKILL
    assert warm.run([*words, "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path), result(uninterrupted))


def test_a_stopped_run_keeps_the_prompts_of_its_iteration(taught, uninterrupted, tmp_path):
    """The checkpoint in the middle of an iteration has what the function said; it is not asked again."""
    words = words_of(taught, tmp_path, SELF, rewarded=True)
    code = warm.run(words, prepare=partial(at, (2, "update", 1), signal.SIGTERM))
    assert code == 128 + signal.SIGTERM
    assert warm.run([*words, "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path), result(uninterrupted))


@pytest.fixture(scope="module")
def uninterrupted(taught, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    assert warm.run(words_of(taught, out, SELF, rewarded=True)) == 0
    return out


@pytest.fixture(scope="module")
def alone(taught, tmp_path_factory):
    """What one process learns, by how it is taught."""
    made = {}

    def learn(words):
        if words not in made:
            made[words] = tmp_path_factory.mktemp("alone")
            assert warm.run(words_of(taught, made[words], words)) == 0
        return made[words]

    return learn


@pytest.mark.short(1)
@pytest.mark.parametrize("teacher", ["--teacher_model {0}/teacher --teacher_divergence reverse_kl", ITSELF])
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_processes_learn_what_one_learns(taught, alone, tmp_path, teacher, layout):
    words = f"{teacher} --max_steps 2"
    assert warm.run(words_of(taught, tmp_path, words, LAYOUTS[layout])) == 0
    expected, found = (
        [row[name] for row in rows(out) for name in ("distance", "loss")] for out in (alone(words), tmp_path)
    )
    assert found == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(weights(tmp_path), weights(alone(words)), atol=1e-4, rtol=1e-3)


# ---- what is refused


@pytest.mark.parametrize("how", ["", "--dry_run"])
@pytest.mark.parametrize(
    "words, said",
    [
        ("--teacher_prompt_key nope", "no column 'nope' (--teacher_prompt_key)"),
        ("--teacher_model {0}/no", "/no does not exist"),
        (
            "--teacher_model {0}/foreign --teacher_divergence jsd",
            "/foreign: its tokenizer is not --pretrain's; use one",
        ),
        ("--teacher_model {0}/small --teacher_divergence jsd", "its vocabulary (40 outputs) is not the student's (46)"),
        ("--teacher_prompt_func {0}/no.py", "--teacher_prompt_func: "),
        ("--teacher_prompt_func {0}/hints.py:nope", "there is no function nope in it"),
        ("--teacher_prompt_key endless", "tokens, with --generate_max_len"),
        ("--teacher_prompt_key hint --teacher_ema", "--teacher_ema is the average that --enable_ema keeps: add it"),
        ("--teacher_prompt_key hint --teacher_prompt_func {0}/hints.py", "both say what the teacher reads: give one"),
        (
            "--teacher_prompt_key hint --jsd_beta 1 --teacher_divergence jsd",
            "--jsd_beta is 1: it must be between 0 and 1",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_one_line(taught, spoilt, tmp_path, words, said, how):
    printed = warm.output(words_of(taught, tmp_path / "out", f"{words} {how} --prompt_data {spoilt}"), 2)
    assert said in printed and "Traceback" not in printed
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def spoilt(taught):
    write_model(taught / "small", vocab_size=40)
    shutil.copytree(taught / "model", taught / "foreign")
    path = taught / "foreign" / "tokenizer.json"
    path.write_text(path.read_text().replace('"<unk>"', '"<what>"'))
    given = [json.loads(line) for line in (taught / "prompts.jsonl").read_text().splitlines()]
    write_rows(
        taught / "spoilt.jsonl", [row | {"endless": "1" * 3000 if i == 4 else ""} for i, row in enumerate(given)]
    )
    return taught / "spoilt.jsonl"


@pytest.mark.parametrize(
    "name, said",
    [
        ("short", "short: a list of 16 prompts is needed"),
        ("fails", "fails failed on"),
        ("long", "tokens, with --generate_max_len"),
        ("mute", "prompts.jsonl, line 4 is empty: return None"),
        ("roleless", "prompts.jsonl, line 4: message 1 of column"),
        ("compute_score", "failed on row "),
    ],
)
def test_a_function_that_fails_stops_the_run_in_one_line(taught, tmp_path, name, said):
    words = f"--teacher_prompt_func {{0}}/hints.py:{name} --teacher_divergence jsd"
    printed = warm.output(words_of(taught, tmp_path, words, rewarded=True), 1)
    assert said in printed and "Traceback" not in printed
    assert "--load_checkpoint" in printed, "nothing of the run is lost"


def test_the_teachers_context_must_hold_the_longest_episode():
    prompts = object.__new__(TeacherPrompts)
    prompts.options = SimpleNamespace(plays=True, episode_max_len=20, generate_max_len=5)
    prompts.room = 25
    assert "--episode_max_len 26" in prompts._too_long(8, 2) and not prompts._too_long(7, 2)
