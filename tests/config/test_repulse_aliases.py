"""RePULSe's 31 training commands: every one means the method and the numbers that its documents say, under its name."""

import itertools

import pytest

from tests.config.every_job import refusal
from trimtab.config.parser import parse
from trimtab.config.repulse_aliases import abbreviated, in_words_of_tail, is_repulse, run_name
from trimtab.config.resolved_config import check, refuse_unimplemented, settle
from trimtab.config.rl_jobs import TailOptions
from trimtab.config.rl_options import MODULATIONS

OFTEN = """--max_ckpt_num 1 --logging_steps 1 --eval_steps -1 --max_epochs 1 --prompt_max_len 1024 --zero_stage 2
    --input_key prompt --max_samples 100000 --gradient_checkpointing --lr_scheduler constant --adam_betas 0.9 0.999
    --n_samples_per_prompt 1 --rm_type rlhf"""
NO_TEST = "--test_info_every 100 --n_seeds_f_q 1 --no_test_info"
PPO = "--parameterization policy --actor_loss_type ppo"
PAIR = """--do_harmlessness_training --num_episodes 1 --parameterization policy_psi_q_p_s_t --actor_loss_type ctl
    --critic_learning_rate 0 --reinforce_baseline_type expectation"""
REINFORCE = f"{PAIR} --harmlessness_training_loss_type reinforce"
TRANSFORM = f"{REINFORCE} --reward_transform minus_alpha_exp_beta_r"
REPULSE = f"{PAIR} --harmlessness_training_loss_type neg_training"
BASE = f"{REPULSE} --use_base_as_proposal"

TOY = f"""{OFTEN} --pretrain distilgpt2 --reward_pretrain nicholasKluge/ToxicityModel --save_path /runs/toy
    --ckpt_path /runs/toy --save_info_path /info/toy --save_steps -1 --micro_train_batch_size 500 --train_batch_size 500
    --micro_rollout_batch_size 1 --rollout_batch_size 1 --duplicate_rollout_batch_by 500 --generate_max_len 2
    --prompt_data Silent-Zebra/this_man_is_a --fit_steps 50 --analytic_bad_word_calc --new_custom_single_prompt"""
HELD_OUT = """--evaluate_heldout_sampling --sampling_iters 1 --heldout_input_key prompt
    --heldout_prompt_data Silent-Zebra/10k_mixed_singleturn_2_1"""
KEPT = "--save_negdata --save_negdata_threshold -5"
ONE = f"""{OFTEN} --pretrain HuggingFaceTB/SmolLM-135M-Instruct --save_path /runs/one --ckpt_path /runs/one
    --reward_pretrain OpenAssistant/reward-model-deberta-v3-large-v2 --save_info_path /info/one --seed 1
    --micro_train_batch_size 250 --train_batch_size 250 --micro_rollout_batch_size 50 --rollout_batch_size 50
    --duplicate_rollout_batch_by 5 --generate_max_len 20 --prompt_data Silent-Zebra/20k_mixed_singleturn_1
    --apply_chat_template --init_kl_coef 0.2 {KEPT} {HELD_OUT}"""
TWO = f"""{OFTEN} --pretrain meta-llama/Llama-3.2-1B-Instruct --bf16 --save_path /runs/two --ckpt_path /runs/two
    --reward_pretrain Skywork/Skywork-Reward-V2-Llama-3.2-1B --save_info_path /info/two --seed 1
    --micro_train_batch_size 20 --train_batch_size 80 --micro_rollout_batch_size 5 --rollout_batch_size 20
    --duplicate_rollout_batch_by 4 --generate_max_len 100 --prompt_data Silent-Zebra/20k_mixed_singleturn_1
    --apply_chat_template --init_kl_coef 2 {HELD_OUT}"""


def toy(method: str, kl: float, alpha: float, beta: float, rate: str, proposal: str, episodes: int, seed: int = 1):
    offload = "--adam_offload" if kl == 0 else ""
    return f"""{TOY} {method} {offload} --init_kl_coef {kl} --alpha {alpha} --target_dist_beta {beta} --seed {seed}
        --base_actor_learning_rate {rate} --actor_learning_rate {proposal} --save_steps_harmless -1
        --harmlessness_training_num_episodes {episodes}"""


def real(setting: str, method: str, alpha: float, beta: float, rate: str, proposal: str, episodes: int, more: str = ""):
    return f"""{setting} {method} --alpha {alpha} --target_dist_beta {beta} --base_actor_learning_rate {rate}
        --actor_learning_rate {proposal} --save_steps -1 --save_steps_harmless 100
        --harmlessness_training_num_episodes {episodes} {more}"""


SHORT = "--rm_max_len 300"
# (command, method, alpha, beta, learning rate of the policy, of the proposal, episodes); None: not part of the method
COMMANDS = [
    (
        f"""{TOY} {PPO} {NO_TEST} --adam_offload --init_kl_coef 0 --num_episodes 10 --seed 1 --actor_learning_rate 1e-4
        --critic_learning_rate 3e-5""",
        *("ppo", None, None, 1e-4, None, 10),
    ),
    (toy(REINFORCE, 0, 0, -10, "1e-4", "0", 10), "reinforce", 0, -10, 1e-4, 0, 10),
    (toy(TRANSFORM, 0, 1, -1, "1e-4", "0", 10), "reinforce_transform", 1, -1, 1e-4, 0, 10),
    (toy(BASE, 0, 0.01, -10, "1e-4", "3e-4", 10), "base_proposal", 0.01, -10, 1e-4, 3e-4, 10),
    (toy(REPULSE, 0, 0.01, -10, "1e-4", "3e-4", 5, seed=5), "repulse", 0.01, -10, 1e-4, 3e-4, 5),
    (toy(REINFORCE, 10, 0, 0, "1e-5", "0", 10), "reinforce", 0, 0, 1e-5, 0, 10),
    (toy(TRANSFORM, 10, 1, -1, "1e-5", "0", 10), "reinforce_transform", 1, -1, 1e-5, 0, 10),
    (toy(TRANSFORM, 10, 10, -1, "1e-5", "0", 10), "reinforce_transform", 10, -1, 1e-5, 0, 10),
    (toy(REPULSE, 10, 100, -1, "1e-5", "3e-4", 5), "repulse", 100, -1, 1e-5, 3e-4, 5),
    (toy(REPULSE, 10, 100, -10, "1e-5", "3e-4", 5), "repulse", 100, -10, 1e-5, 3e-4, 5),
    (
        f"""{ONE} {PPO} {NO_TEST} --save_steps 100 --num_episodes 4 --actor_learning_rate 3e-5
        --critic_learning_rate 3e-5""",
        *("ppo", None, None, 3e-5, None, 4),
    ),
    (real(ONE, REINFORCE, 0, 0, "3e-5", "0", 4, NO_TEST), "reinforce", 0, 0, 3e-5, 0, 4),
    *(
        (real(ONE, TRANSFORM, a, b, "3e-5", "0", 4, NO_TEST), "reinforce_transform", a, b, 3e-5, 0, 4)
        for a, b in ((1, -0.1), (0.3, -0.5), (1, -0.3), (1, -0.5))
    ),
    *((real(ONE, BASE, a, -30, "3e-5", "0", 4, SHORT), "base_proposal", a, -30, 3e-5, 0, 4) for a in (0.1, 1)),
    *(
        (real(ONE, REPULSE, 0.1, b, "3e-5", rate, 2, SHORT), "repulse", 0.1, b, 3e-5, float(rate), 2)
        for b, rate in ((-10, "3e-5"), (-20, "2e-5"), (-30, "1e-5"))
    ),
    (
        f"{TWO} {PPO} --save_steps 100 --num_episodes 4 --actor_learning_rate 3e-7 --critic_learning_rate 3e-6 {KEPT}",
        *("ppo", None, None, 3e-7, None, 4),
    ),
    (real(TWO, REINFORCE, 0, 0, "1e-7", "0", 4), "reinforce", 0, 0, 1e-7, 0, 4),
    *(
        (real(TWO, TRANSFORM, a, b, rate, "0", 4), "reinforce_transform", a, b, float(rate), 0, 4)
        for a, b, rate in ((3, -0.3, "1e-7"), (1, -1, "1e-7"), (3, -0.3, "3e-7"), (1, -1, "3e-7"))
    ),
    (real(TWO, BASE, 0.1, -10, "3e-7", "0", 4), "base_proposal", 0.1, -10, 3e-7, 0, 4),
    (real(TWO, BASE, 1, -10, "1e-7", "0", 4), "base_proposal", 1, -10, 1e-7, 0, 4),
    *((real(TWO, REPULSE, a, -5, "3e-7", "3e-7", 2), "repulse", a, -5, 3e-7, 3e-7, 2) for a in (0.1, 0.2)),
]
PLACES = {"/toy": (500, 1, 2), "/one": (5, 50, 20), "/two": (4, 20, 100)}  # answers a prompt, prompts, tokens


def understood(words: str | list[str]) -> TailOptions:
    words = words.split() if isinstance(words, str) else words
    assert is_repulse(words)
    options, warnings = settle(parse(TailOptions, in_words_of_tail(words)))
    assert warnings + check(options) == []
    refuse_unimplemented(options)
    return options


def test_there_are_31_commands():
    assert len({command for command, *_ in COMMANDS}) == 31


@pytest.mark.parametrize("command, method, alpha, beta, rate, proposal, episodes", COMMANDS)
def test_a_documented_command_means_its_method_and_its_numbers(command, method, alpha, beta, rate, proposal, episodes):
    options = understood(command)
    assert (options.method, options.actor_learning_rate, options.num_episodes) == (method, rate, episodes)
    if method != "ppo":
        found = (options.alpha, options.target_dist_beta, options.proposal_learning_rate, options.proposal_updates)
        assert found == (alpha, beta, proposal, 1)
        assert (options.proposal, options.proposal_loss) == ("model", "ctl")
        assert options.reinforce_baseline_type == "expectation"
    group, prompts, tokens = PLACES[options.save_info_path[-4:]]
    assert (options.n_samples_per_prompt, options.rollout_batch_size) == (group, prompts)
    assert (options.generate_max_len, options.train_batch_size) == (tokens, group * prompts)
    assert options.advantage_estimator == ("gae" if method == "ppo" else "rloo")
    assert options.push_down_scale == "per_sample" and options.token_reduction == "token_mean"
    in_toy = options.single_prompt == "This man is a" and options.analytic_bad_word_calc and options.fit_steps == 50
    assert in_toy == options.save_info_path.endswith("toy") != options.evaluate_heldout_sampling
    assert options.save_steps == (-1 if in_toy else 100)
    assert options.rm_max_len == (300 if SHORT in command else 2048)


def test_every_run_has_folders_of_its_own_under_its_name():
    everyone = [understood(command) for command, *_ in COMMANDS]
    assert len({options.save_path for options in everyone}) == 31
    for options in everyone:
        suffix = "_actor" if options.method == "ppo" else "_harml_actor"
        assert options.save_path == f"{options.negdata_path}/{run_name(options)}{suffix}"
        assert options.ckpt_path == f"{options.save_path}/checkpoints"
        last = "policy" if options.method == "ppo" else Q
        assert run_name(options).endswith(f"_{last}_s{options.seed}"), "nothing that the original does not say"


def test_what_is_annealed_is_understood_and_named():
    command, *_ = COMMANDS[3]  # base proposal
    start = "--start_target_dist_beta -1 --start_alpha 0.5"
    options = understood(f"{command} --anneal_target_dist_beta {start}")
    assert (options.start_target_dist_beta, options.start_alpha) == (-1, 0.5)
    assert "_start-1.0_beta-10.0_harml_neg_training_start0.5_a0.01_" in run_name(options)
    left = understood(f"{command} {start}")  # without the switch the original does not look at them
    assert (left.start_target_dist_beta, left.start_alpha) == (None, None)


Q = "policy_psi_q_p_s_t"


@pytest.mark.parametrize(
    "number, name",
    [
        (0, "rlhf_di_To_thmaisa_len2_kl0.0_beta10000_policy_ppo_epo1_epi10_schconstant_alr0.0001_clr3e-05_clossmse_"
            "policy_s1"),
        (3, f"rlhf_baseprop_di_To_thmaisa_len2_kl0.0_beta-10.0_harml_neg_training_a0.01_{Q}_ctl_epo1_epi10_schconstant_"
            f"alr0.0003_blr0.0001_{Q}_s1"),
        (7, f"rlhf_di_To_thmaisa_len2_kl10.0_beta-1.0_harml_reinforce_a10.0rta10.0_b-1.0_{Q}_ctl_epo1_epi10_"
            f"schconstant_alr0.0_blr1e-05_{Q}_s1"),
        (10, "rlhf_Sm13In_remodev3lav2_20misi1_len20_kl0.2_beta5.0_policy_ppo_epo1_epi4_schconstant_alr3e-05_clr3e-05_"
             "clossmse_policy_s1"),
        (11, f"rlhf_Sm13In_remodev3lav2_20misi1_len20_kl0.2_beta0.0_harml_reinforce_a0.0_{Q}_ctl_epo1_epi4_schconstant_"
             f"alr0.0_blr3e-05_{Q}_s1"),
        (20, f"rlhf_Sm13In_remodev3lav2_20misi1_len20_kl0.2_beta-30.0_harml_neg_training_a0.1_{Q}_ctl_epo1_epi2_"
             f"schconstant_alr1e-05_blr3e-05_{Q}_s1"),
        (21, "rlhf_Ll3.1BIn_SkReV2Ll3.1B_20misi1_len100_kl2.0_beta0.5_policy_ppo_epo1_epi4_schconstant_alr3e-07_"
             "clr3e-06_clossmse_policy_s1"),
    ],
)  # fmt: skip
def test_runs_have_the_names_that_the_original_gives_them(number, name):
    assert run_name(understood(COMMANDS[number][0])) == name


def test_settings_that_learn_something_else_have_names_and_folders_of_their_own():
    repulse, transform = COMMANDS[18][0], COMMANDS[12][0]
    settings = [
        *(repulse, f"{repulse} --push_down_scale per_group", f"{repulse} --token_reduction token_sum"),
        *(f"{repulse} --proposal_lora_rank {rank}" for rank in (8, 12, 128)),
        f"{repulse} --push_down_scale per_group --token_reduction token_sum --proposal_lora_rank 8",
        *(repulse.replace("--num_episodes 1", f"--num_episodes {updates}") for updates in (2, 3)),
        *(repulse.replace(Q, theirs) for theirs in MODULATIONS),
        repulse.replace("type ctl", "type ctl_nosecondterm"),
        repulse.replace("type expectation", "type none"),
        *(repulse.replace("type expectation", f"type hardcoded --reinforce_hardcoded_baseline {b}") for b in (1, -1)),
        *(f"{repulse} --reward_input {reads}" for reads in ("pair", "text", "chat")),
        *(f"{repulse} --single_prompt {text}" for text in ("That", "This")),
        *(transform, transform.replace("minus_alpha_exp_beta_r", "minus_alpha_ind --threshold -5")),
        transform.replace("minus_alpha_exp_beta_r", "minus_alpha_ind --threshold -6"),
    ]
    everyone = [understood(command) for command in settings]
    for one, other in itertools.combinations(everyone, 2):
        for place in (run_name, lambda options: options.save_path, lambda options: options.ckpt_path):
            assert place(one) != place(other)
    assert all(run_name(options).endswith("_s1") for options in everyone), "the seed comes last"
    assert run_name(everyone[6]) == run_name(everyone[0]).replace("_s1", "_pdpegr_trtosu_pl8_s1")


def test_what_is_only_measured_is_not_part_of_a_name():
    measured = understood(f"{COMMANDS[18][0]} --threshold -5 --report_samples 3")
    assert run_name(measured) == run_name(understood(COMMANDS[18][0]))


@pytest.mark.parametrize("theirs", [Q, *MODULATIONS])
def test_parameterizations_are_proposals(theirs):
    options = understood(COMMANDS[18][0].replace(Q, theirs))
    assert options.proposal == (theirs if theirs in MODULATIONS else "model")
    assert run_name(options).count(theirs) == 2


def test_a_proposal_may_be_trained_more_often_and_without_the_second_term():
    options = understood(
        COMMANDS[18][0].replace("--num_episodes 1", "--num-episodes=3").replace("type ctl", "type ctl_nosecondterm")
    )
    assert (options.proposal_updates, options.proposal_loss, options.num_episodes) == (3, "ctl_nosecondterm", 2)


REPULSE_COMMAND, PPO_COMMAND = COMMANDS[18][0], COMMANDS[10][0]


@pytest.mark.parametrize(
    "command, complaint",
    [
        (REPULSE_COMMAND.replace("--do_harmlessness_training", ""), "--do_harmlessness_training is missing"),
        (REPULSE_COMMAND + " --do_harmlessness_training False", "--do_harmlessness_training is missing"),
        (REPULSE_COMMAND.replace(Q, "policy"), "that is PPO"),
        (REPULSE_COMMAND.replace(Q, "policy_psi_unnorm"), "--parameterization policy_psi_unnorm: it must be policy or"),
        (REPULSE_COMMAND.replace("type ctl", "type sixo"), "--actor_loss_type sixo"),
        (REPULSE_COMMAND.replace("type ctl", "type ppo"), "that is PPO"),
        (REPULSE_COMMAND.replace("neg_training", "neg_reinforce"), "neg_reinforce is none of the methods"),
        (f"{REPULSE_COMMAND} --reward_transform x", "neg_training with --reward_transform is none"),
        (COMMANDS[11][0] + " --use_base_as_proposal", "reinforce with --use_base_as_proposal is none"),
        (REPULSE_COMMAND.replace("--harmlessness_training_loss_type neg_training", ""), "type None is none"),
        (f"{REPULSE_COMMAND} --rm_type toxicity", "--rm_type toxicity: the only potential"),
        (f"{REPULSE_COMMAND} --n_samples_per_prompt 2", "--n_samples_per_prompt must be 1 in this spelling"),
        (REPULSE_COMMAND.replace("--target_dist_beta -10", ""), "--target_dist_beta is missing"),
        (REPULSE_COMMAND.replace("--alpha 0.1", ""), "--alpha is missing"),
        (f"{PPO_COMMAND} --target_dist_beta -1", "PPO has no target distribution"),
        (f"{PPO_COMMAND} --use_base_as_proposal", "that is PPO"),
        (f"stray {PPO_COMMAND}", "unexpected 'stray'"),
        (f"{PPO_COMMAND} --parameterization", "--parameterization takes one value"),
        (f"{REPULSE_COMMAND} --nonsense 1", "unknown option --nonsense"),
        (f"{REPULSE_COMMAND} --target_dist_beta 10", "--target_dist_beta 10: with --method repulse it must be below 0"),
        (f"{REPULSE_COMMAND} --duplicate_rollout_batch_by 1", "--n_samples_per_prompt 1: --method repulse weighs"),
        (f"{COMMANDS[16][0]} --num_episodes 2", "--proposal_updates: --method base_proposal has no proposal"),
    ],
)
def test_what_means_none_of_the_methods_is_refused_in_one_line(command, complaint):
    assert complaint in refusal(understood, command)


@pytest.mark.parametrize(
    "words", ["--pretrain a/b --prompt_data c/d --actor_learning_rate 1e-6", "--reward_pretrain --alpha", ""]
)
def test_other_commands_of_train_ppo_are_left_alone(words):
    assert not is_repulse(words.split())


@pytest.mark.parametrize(
    "place, short",
    [
        ("HuggingFaceTB/SmolLM-135M-Instruct", "Sm13In"),
        ("meta-llama/Llama-3.2-1B-Instruct", "Ll3.1BIn"),
        ("./data/20k_mixed_singleturn_1/", "20misi1"),
        ("distilgpt2", "di"),
    ],
)
def test_places_are_shortened_word_by_word(place, short):
    assert abbreviated(place) == short
