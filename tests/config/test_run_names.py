import pytest

from trimtab.config.repulse_aliases import RunName, abbreviated

SETTING_1 = {
    "rm_type": "rlhf",
    "pretrain": "HuggingFaceTB/SmolLM-135M-Instruct",
    "reward_pretrain": "OpenAssistant/reward-model-deberta-v3-large-v2",
    "prompt_data": "Silent-Zebra/20k_mixed_singleturn_1",
    "generate_max_len": 20,
    "init_kl_coef": 0.2,
    "max_epochs": 1,
    "lr_scheduler": "constant",
    "seed": 1,
}


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


def test_the_run_of_the_documented_attack_has_its_name():
    name = RunName(
        **SETTING_1,
        target_dist_beta=-30.0,
        parameterization="policy_psi_q_p_s_t",
        actor_loss_type="ctl",
        episodes=2,
        actor_learning_rate=1e-5,
        base_actor_learning_rate=3e-5,
        push_down_loss="neg_training",
        alpha=0.1,
    )
    assert str(name) == (
        "rlhf_Sm13In_remodev3lav2_20misi1_len20_kl0.2_beta-30.0_harml_neg_training_a0.1_policy_psi_q_p_s_t_ctl_epo1_"
        "epi2_schconstant_alr1e-05_blr3e-05_policy_psi_q_p_s_t_s1"
    )


def test_ppo_and_the_transform_differ_from_it_as_the_grammar_says():
    often = {**SETTING_1, "episodes": 4, "actor_learning_rate": 0}
    ppo = RunName(
        **{**often, "init_kl_coef": 0, "actor_learning_rate": 3e-5},
        target_dist_beta=10000,
        parameterization="policy",
        actor_loss_type="ppo",
        critic_learning_rate=3e-5,
    )
    assert str(ppo).endswith("_kl0.0_beta10000_policy_ppo_epo1_epi4_schconstant_alr3e-05_clr3e-05_policy_s1")
    transform = RunName(
        **often,
        target_dist_beta=-0.5,
        parameterization="policy_psi_q_p_s_t",
        actor_loss_type="ctl",
        base_actor_learning_rate=3e-5,
        push_down_loss="reinforce",
        alpha=0.3,
        transform=(0.3, -0.5),
    )
    assert "_beta-0.5_harml_reinforce_a0.3rta0.3_b-0.5_policy_psi" in str(transform)
